"""What this process has registered, as the session keeps it; `component.py` is what users see."""

from typing import NamedTuple

from swapd.shared import vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import RANGES_MAX, Placement, Ranges, Scratch, Used
from swapd_client.memory.layout import Layout
from swapd_client.memory.place import Place
from swapd_client.memory.scratch import told


class Claim(NamedTuple):
    """What is on its way into a component: the addresses of all that it moves."""

    owner: object
    #: The component, or the family that it is a part of: parts of one may share, as far as this
    #: goes.
    name: str
    memory: tuple[int, ...]


class Part:
    """A component of this process: where it is, what it is made of, and its host copy.

    Fields that change do so under the lock of its session.
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
    ) -> None:
        self.name = name
        #: The family that it is a part of, or "".
        self.part_of = part_of
        self.nbytes = layout.nbytes
        self.address = where.address
        self.mutable = mutable
        #: How many segments it arrives in.
        self.segments = len(layout.segments)
        self.layout = layout
        self.where = where
        #: Its host copy, once the daemon has sent it.
        self.master: OwnedFd | None = None
        #: Of the board: where its arrival is told.
        self.slot = 0
        #: What it is made of, until that is in its range.
        self.claim = claim
        #: The request that its master comes for.
        self.request = 0
        #: Of scratch: since which residency it has the contents that a lease was asked after last.
        self.contents = 0
        #: The last residency whose contents were not kept: dropped, or not saved.
        self.lost = -1
        #: And what its owner said last is worth saving; None once a release has told it.
        self.used: Used | None = None
        self.used_number = 0
        #: How many leases of this process are on it.
        self.holders = 0
        #: Requests up to this one may have been granted the bytes before the last update.
        self.renewed = 0
        #: Where it was when it was granted last.
        self.placed: Placement | None = None
        #: Not every byte had come in there when the session ended.
        self.incomplete = False

    def __repr__(self) -> str:
        return f"<Part {self.name} {self.nbytes >> 20} MiB at {self.address:#x}>"

    @property
    def span(self) -> int:
        """Its bytes, rounded up to whole pages."""
        return vm.round_up(max(self.nbytes, 1))

    @property
    def scratch(self) -> Scratch:
        """Whether it is scratch, and what becomes of its contents when it leaves the device."""
        return self.layout.scratch

    @property
    def is_lost(self) -> bool:
        """Of scratch: whether what it had when it was granted last has left, and was not kept."""
        return self.lost >= self.where.generation

    def note_used(self, ranges: Ranges) -> None:
        """So much of it is worth saving; the release of a lease on it tells the daemon."""
        self.used_number += 1
        self.used = Used(self.name, self.used_number, ranges)

    def used_in(self, parts: int) -> Used:
        """What `note_used` was told, as a message has room for that of so many parts."""
        assert self.used is not None
        most = max(RANGES_MAX // parts, 1)
        if len(self.used.ranges) <= most:
            return self.used
        return Used(self.name, self.used.number, told(self.used.ranges, self.nbytes, most))

    def is_of(self, name: str) -> bool:
        """Whether that is what it is called, or a family that it is a part of."""
        return name in (self.name, self.part_of)

    def map_master(self) -> int:
        """Map its host copy, and return the address: private and writable, `span` bytes.

        The pages are the master's until they are written to. The caller frees it, and sees to it
        that nobody closes the master meanwhile (`Registry.map_master`).
        """
        assert self.master is not None
        address = vm.reserve(self.span)
        try:
            vm.map_private(self.master.fileno(), self.span, at=address)
        except BaseException:
            vm.free(address, self.span)
            raise
        return address

    def bind(self) -> None:
        """It is registered: its bytes are at the range from now on."""
        self.where.used_by(self.layout.bind(self.address))
        if self.layout.has_views:
            self.where.used_by([self])  # they are made later, too

    def close(self) -> None:
        if self.master is not None:
            self.master.close()
