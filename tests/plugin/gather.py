"""What a process group gathers, for ranks that are threads of one process."""

import threading
from collections.abc import Callable, Sequence

from tests.guarantees.harness import PATIENCE_S


class Gather:
    """What a process group's gather does, as often as it is called: everybody gets what all have
    said, in order."""

    def __init__(self, size: int) -> None:
        self._said = [""] * size
        self._all = threading.Barrier(size)

    def share(self, rank: int) -> Callable[[str], Sequence[str]]:
        def share(mine: str) -> Sequence[str]:
            self._said[rank] = mine
            self._all.wait(PATIENCE_S)
            said = list(self._said)  # before anybody says more
            self._all.wait(PATIENCE_S)
            return said

        return share
