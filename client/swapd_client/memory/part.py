"""A registered component of this process, as the session keeps it. Users see `component.py`."""

import fcntl
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from swapd.shared import vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import RANGES_MAX, Placement, Policy, Ranges, Scratch, UsedRanges
from swapd_client.memory.layout import Layout, T, through_mapping
from swapd_client.memory.place import Place
from swapd_client.memory.scratch import told

if TYPE_CHECKING:
    import torch


class Claim(NamedTuple):
    """Tensors that are about to become a component: the addresses of all memory that moves."""

    owner: object
    #: The component or its family: parts of a family may share memory.
    name: str
    memory: tuple[int, ...]


class Part:
    """A component of this process: its addresses, layout and host copy.

    Fields change under the session's lock only.
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
        self.name = name
        self.part_of = part_of
        self.nbytes = layout.nbytes
        self.address = where.address
        self.mutable = mutable
        self.policy = policy
        self.group = group
        self.module = module
        self.segments = len(layout.segments)
        self.layout = layout
        #: Ranges that the owner wants saved; None once a release has sent them.
        self.used: UsedRanges | None = None
        self.used_number = 0
        #: The block of `registry.alone` that updates or unregisters it.
        self.changed_in: object = None
        #: Whether the component was another daemon's before: its tensors are in the range already.
        self.is_again = False
        self._begin(where, claim, None)

    def _begin(self, where: Place, claim: Claim, old_master: OwnedFd | None) -> None:
        self.where = where
        #: A dead daemon's host copy, while the component waits for the next daemon.
        self.old_master = old_master
        self.master: OwnedFd | None = None
        #: The component's slot on the board.
        self.slot = 0
        #: The source's memory, until `bind`.
        self.claim = claim
        self.request = 0
        #: For scratch: the residency of the contents that `Leases.is_fresh` last saw.
        self.contents = 0
        #: The last residency whose contents were dropped or not saved.
        self.lost = -1
        #: Leases of this process on the component.
        self.holders: set[int] = set()
        #: Requests up to this one may have been granted the bytes before the last update.
        self.renewed = 0
        self.placed: Placement | None = None
        #: Whether the component was still loading when the session ended.
        self.incomplete = False
        #: Storages of the module's parameters, for `sources.watch`.
        self.watched: list[weakref.ref[object]] = []

    def __repr__(self) -> str:
        return f"<Part {self.name} {self.nbytes >> 20} MiB at {self.address:#x}>"

    def begin_again(
        self, where: Place, claim: Claim, old_master: OwnedFd | None, *, is_lost: bool
    ) -> None:
        """Begin again in another session, after the daemon's end.

        `old_master` has the bytes, and belongs to the part from now on. If None, the private memory
        in the range has them, unless they are lost.
        """
        self.is_again = True
        if old_master is None or self.mutable:
            self.layout.content = ""  # its bytes may have changed since they were read
        self.layout.filled = self.scratch == "saved"
        if self.old_master is not old_master:
            self.close_old()
        self._begin(where, claim, old_master)
        if is_lost:
            self.lost = 0  # until the next grant

    def sealed_master(self) -> OwnedFd | None:
        """Return the host copy, for the caller, if the range may be a private mapping of it."""
        if (master := self.old_master or self.master) is None or self.scratch or not self.nbytes:
            return None
        if not self.where.addressable:  # on a GPU, writes to private memory cannot be detected
            return None
        with suppress(OSError, ValueError):  # no descriptor is free, or it is closed already
            if fcntl.fcntl(master.fileno(), fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                return OwnedFd(os.dup(master.fileno()))
        return None

    def has_old_bytes(self) -> bool:
        """Whether the daemon's host copy is the old one, which others may share, or equals it."""
        assert self.old_master is not None
        assert self.master is not None
        if os.path.sameopenfile(self.old_master.fileno(), self.master.fileno()):
            return True
        return self._from_old(vm.has_bytes)

    def fill_from_old(self) -> None:
        self._from_old(vm.write)

    def _from_old(self, do: Callable[[int, int, int, int], T]) -> T:
        """Return `do(new file, 0, address of the old host copy's bytes, their number)`."""
        assert self.old_master is not None
        assert self.master is not None
        old, new = self.old_master.fileno(), self.master.fileno()
        return through_mapping(old, self.span, lambda at: do(new, 0, at, self.nbytes))

    @property
    def span(self) -> int:
        return vm.round_up(max(self.nbytes, 1))

    @property
    def scratch(self) -> Scratch:
        """The kind of scratch, which decides on its contents at eviction; "" if it is none."""
        return self.layout.scratch

    @property
    def is_lost(self) -> bool:
        """For scratch: whether the contents of the last grant have left and were not kept."""
        return self.lost >= self.where.generation

    @property
    def has_contents(self) -> bool:
        """Whether it has bytes to keep. Scratch that loads as zeros has none."""
        return self.scratch != "dropped" and not self.is_lost

    def note_used(self, ranges: Ranges) -> None:
        """Save only these ranges. The release of a lease tells the daemon."""
        self.used_number += 1
        self.used = UsedRanges(self.name, self.used_number, ranges)

    def used_in(self, parts: int) -> UsedRanges:
        """Return the last `note_used`, with as many ranges as fit a message for `parts` parts."""
        assert self.used is not None
        most = max(RANGES_MAX // parts, 1)
        if len(self.used.ranges) <= most:
            return self.used
        return UsedRanges(self.name, self.used.number, told(self.used.ranges, self.nbytes, most))

    def is_of(self, name: str) -> bool:
        return name in (self.name, self.part_of)

    def map_master(self) -> int:
        """Map `span` bytes of the host copy, private and writable; return the address.

        The caller frees the mapping, and keeps the host copy open: pages are its own until written
        to.
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
        """Put the bytes at the range."""
        if self.is_again:
            return
        self.where.used_by(self.layout.bind(self.address))
        if self.layout.has_views:
            self.where.used_by([self])  # views may be made later, too
        self.layout.let_go()

    def close(self) -> None:
        self.watched.clear()
        if self.master is not None:
            self.master.close()
            self.master = None

    def close_old(self) -> None:
        if self.old_master is not None:
            self.old_master.close()
            self.old_master = None
