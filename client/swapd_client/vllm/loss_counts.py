"""Counts that the ranks of a stage share: how often each of them has lost something.

A rank writes its own count before it computes a step, and rank 0 reads all counts when the step has
computed. No rank sends a message or waits. That is enough: a rank can change the result of a
step only through a collective of that step, and it writes its count before it joins one. So rank 0
reads at least the losses that the step can have read. It may read a later one, too: then the step
is computed again without need.

The memory belongs to the ranks alone, and a rank that dies leaves its count in it.
"""

import ctypes
import os

from swapd.shared import vm
from swapd.shared.fds import OwnedFd

_BYTES = 8


class LossCounts:
    """The counts of one stage, for one of its ranks."""

    def __init__(self, fd: int, rank: int, ranks: int) -> None:
        """Map the memory behind `fd`, which stays the caller's: see `memory_for`."""
        self._rank = rank
        address = vm.map_shared(fd, 0, _BYTES * ranks, writable=True)
        self._counts = (ctypes.c_uint64 * ranks).from_address(address)
        vm.free_with(self, address, _BYTES * ranks)

    @property
    def reports(self) -> bool:
        """Whether vLLM listens to this rank: it takes the output of rank 0 only."""
        return self._rank == 0

    @property
    def total(self) -> int:
        """The losses of all ranks; it never decreases."""
        return sum(self._counts)

    def set(self, losses: int) -> None:
        """This rank has lost something so often."""
        self._counts[self._rank] = losses


def memory_for(ranks: int) -> OwnedFd:
    """New memory for the counts of so many ranks, all of them 0."""
    fd = OwnedFd(os.memfd_create("swapd-ranks", os.MFD_CLOEXEC))
    os.ftruncate(fd.fileno(), _BYTES * ranks)
    return fd
