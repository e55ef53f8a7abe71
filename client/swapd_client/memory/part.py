"""A registered component of this process, as the session keeps it; users see `component.py`."""

import fcntl
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from swapd.shared import vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import RANGES_MAX, Placement, Policy, Ranges, Scratch, Used
from swapd_client.memory.layout import Layout, T, through_mapping
from swapd_client.memory.place import Place
from swapd_client.memory.scratch import told

if TYPE_CHECKING:
    import torch


class Claim(NamedTuple):
    """Tensors that are about to become a component: the addresses of all memory that it moves."""

    owner: object
    #: The component, or its family: parts of a family may share memory.
    name: str
    memory: tuple[int, ...]


class Part:
    """A component of this process: its addresses, its layout, and its host copy.

    Fields change under the lock of the session only.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        where: Place,
        claim: Claim,
        *,
        mutable: bool,
        part_of: str = "",
        policy: Policy = "lru",
        group: str | None = None,
        module: "weakref.ref[torch.nn.Module] | None" = None,
    ) -> None:
        """`module`: that it is made of, if it is one."""
        self.name = name
        #: Its family, or "".
        self.part_of = part_of
        self.nbytes = layout.nbytes
        self.address = where.address
        self.mutable = mutable
        self.policy = policy
        self.group = group
        self.module = module
        #: The number of segments that it arrives in.
        self.segments = len(layout.segments)
        self.layout = layout
        #: The ranges that the owner wants saved; None once a release has sent them.
        self.used: Used | None = None
        self.used_number = 0
        #: Whether it was of another daemon before: its tensors are in the range already.
        self.is_again = False
        self._begin(where, claim, None)

    def _begin(self, where: Place, claim: Claim, old_master: OwnedFd | None) -> None:
        self.where = where
        #: The host copy of the daemon that is gone, from the time when nothing of that is mapped
        #: until the component is registered with the next one, or has left.
        self.old_master = old_master
        #: Its host copy, once the daemon has sent it.
        self.master: OwnedFd | None = None
        #: The slot of the board that shows its arrival.
        self.slot = 0
        #: The memory that it is made from, until the bytes are in its range.
        self.claim = claim
        #: The request that the host copy answers.
        self.request = 0
        #: For scratch: the residency of the contents that the last lease was asked about.
        self.contents = 0
        #: The last residency whose contents were dropped, or not saved.
        self.lost = -1
        #: The number of leases of this process on it.
        self.holders: set[int] = set()
        #: Requests up to this one may have been granted the bytes before the last update.
        self.renewed = 0
        #: Its place at the last grant.
        self.placed: Placement | None = None
        #: Whether bytes were still missing on the device when the session ended.
        self.incomplete = False
        #: The storages of its module's parameters, until it is unregistered (`sources.watch`).
        self.watched: list[weakref.ref[object]] = []

    def __repr__(self) -> str:
        return f"<Part {self.name} {self.nbytes >> 20} MiB at {self.address:#x}>"

    def begin_again(self, where: Place, claim: Claim, old_master: OwnedFd | None) -> None:
        """Its daemon is gone: it begins again in another session.

        `old_master` has its bytes, and is owned by it from now on; None: the private memory in its
        range has them.
        """
        self.is_again = True
        if old_master is None or self.mutable:
            self.layout.content = ""  # its bytes may have changed since they were read
        self.layout.filled = self.scratch == "saved"
        if self.old_master is not old_master:
            self.close_old()
        is_lost = self.is_lost
        self._begin(where, claim, old_master)
        if is_lost:
            self.lost = 0  # until the next grant

    def sealed_master(self) -> OwnedFd | None:
        """Its host copy for the next daemon, if its range may be a private mapping of that.

        The caller owns the descriptor.
        """
        if (master := self.old_master or self.master) is None or self.scratch or not self.nbytes:
            return None
        if not self.where.addressable:  # a copy in a GPU's memory: nothing tells of writes there
            return None
        with suppress(OSError, ValueError):  # no descriptor is free, or it is closed already
            if fcntl.fcntl(master.fileno(), fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                return OwnedFd(os.dup(master.fileno()))
        return None

    def has_old_bytes(self) -> bool:
        """Whether the daemon's host copy is the old one, which others may share, or is equal."""
        assert self.old_master is not None
        assert self.master is not None
        if os.path.sameopenfile(self.old_master.fileno(), self.master.fileno()):
            return True
        return self._from_old(vm.has_bytes)

    def fill_from_old(self) -> None:
        self._from_old(vm.write)

    def _from_old(self, do: Callable[[int, int, int, int], T]) -> T:
        """`do(file of the host copy, 0, address of the old host copy's bytes, their number)`."""
        assert self.old_master is not None
        assert self.master is not None
        old, new = self.old_master.fileno(), self.master.fileno()
        return through_mapping(old, self.span, lambda at: do(new, 0, at, self.nbytes))

    @property
    def span(self) -> int:
        """Its bytes, rounded up to whole pages."""
        return vm.round_up(max(self.nbytes, 1))

    @property
    def scratch(self) -> Scratch:
        """The kind of scratch, which decides on its contents at eviction; "" if it is none."""
        return self.layout.scratch

    @property
    def is_lost(self) -> bool:
        """For scratch: whether the contents of the last grant have left, and were not kept."""
        return self.lost >= self.where.generation

    @property
    def has_contents(self) -> bool:
        """Whether it has bytes to keep: all but scratch that loads as zeros the next time."""
        return self.scratch != "dropped" and not self.is_lost

    def note_used(self, ranges: Ranges) -> None:
        """Save only these ranges; the release of a lease on it tells the daemon."""
        self.used_number += 1
        self.used = Used(self.name, self.used_number, ranges)

    def used_in(self, parts: int) -> Used:
        """The last `note_used`, with as many ranges as fit a message for that many parts."""
        assert self.used is not None
        most = max(RANGES_MAX // parts, 1)
        if len(self.used.ranges) <= most:
            return self.used
        return Used(self.name, self.used.number, told(self.used.ranges, self.nbytes, most))

    def is_of(self, name: str) -> bool:
        """Whether it has this name, or is in this family."""
        return name in (self.name, self.part_of)

    def map_master(self) -> int:
        """Map its host copy, and return the address: private and writable, `span` bytes.

        The pages are the host copy's until they are written to. The caller frees the mapping, and
        ensures that the host copy stays open meanwhile (`Registry.map_master`).
        """
        master = self.master or self.old_master
        assert master is not None
        address = vm.reserve(self.span)
        try:
            vm.map_private(master.fileno(), self.span, at=address)
        except BaseException:
            vm.free(address, self.span)
            raise
        return address

    def bind(self) -> None:
        """It is registered: its bytes are at the range from now on."""
        if self.is_again:
            return
        self.where.used_by(self.layout.bind(self.address))
        if self.layout.has_views:
            self.where.used_by([self])  # views are made later, too
        self.layout.let_go()

    def close(self) -> None:
        self.watched.clear()
        if self.master is not None:
            self.master.close()

    def close_old(self) -> None:
        if self.old_master is not None:
            self.old_master.close()
            self.old_master = None
