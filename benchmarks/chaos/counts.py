"""Counters and faults of workers that may be killed at any time: in files, not in memory."""

import mmap
import os
import struct
import traceback
from pathlib import Path

NAMES = (
    "sessions",
    "acquires",
    "checks",
    "MiB checked",
    "writes",
    "updates",
    "families",
    "in segments",
    "exchanges",
    "workspaces",
    "shared loads",
    "of these, files read",
    "cancelled",
    "registered again",
    "daemons lost",
)
_WORD = struct.Struct("Q")


class Counts:
    """The counts of one worker; its successors go on counting."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._faults = folder / "faults"
        fd = os.open(folder / f"{worker}.counts", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, _WORD.size * len(NAMES))
        self._words = memoryview(mmap.mmap(fd, _WORD.size * len(NAMES))).cast("Q")
        os.close(fd)
        self._worker = worker

    def add(self, name: str, count: int = 1) -> None:
        self._words[NAMES.index(name)] += count

    def get(self, name: str) -> int:
        return self._words[NAMES.index(name)]

    def fault(self, kind: str, what: str) -> None:
        """Record a failure that must never happen. `kind`: "wrong bytes", "endless" or
        "refused"."""
        with self._faults.open("a") as file:
            file.write(f"{kind}: {self._worker}: {what}".replace("\n", " | ") + "\n")

    def unexpected(self, error: BaseException) -> None:
        where = "".join(traceback.format_exception(error))
        self.fault("refused", f"{type(error).__name__}: {error} ({where})")
