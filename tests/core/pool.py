"""A pool of named things, for the tests of `deadlock.py`: agents hold sets of names."""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet


class SetPool:
    """`fits` returns whether a set of names can be in together."""

    def __init__(
        self,
        wants: Mapping[int, AbstractSet[str]],
        holds: Mapping[int, AbstractSet[str]],
        fits: Callable[[AbstractSet[str]], bool],
    ) -> None:
        self._wants = wants
        self._holds = dict(holds)
        self._fits = fits

    def copy(self) -> "SetPool":
        return SetPool(self._wants, self._holds, self._fits)

    def held(self) -> set[str]:
        return set[str]().union(*self._holds.values())

    def can_run(self, agent: int) -> bool:
        return self._fits(self._wants[agent] | self.held())

    def run(self, agent: int) -> None:
        del self._holds[agent]
