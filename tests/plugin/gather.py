"""The gather of a process group, for ranks that are threads of one process."""

import threading
from collections.abc import Callable, Sequence

from tests.guarantees.harness import PATIENCE_S


class Gather:
    """Gathers any number of times: each rank gets the strings of all ranks, by rank."""

    def __init__(self, size: int) -> None:
        self._said = [""] * size
        self._all = threading.Barrier(size)

    def share(self, rank: int) -> Callable[[str], Sequence[str]]:
        def share(mine: str) -> Sequence[str]:
            self._said[rank] = mine
            self._all.wait(PATIENCE_S)
            said = list(self._said)  # before any rank shares its next string
            self._all.wait(PATIENCE_S)
            return said

        return share
