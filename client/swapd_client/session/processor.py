"""What computes on the weights: the CPU, or a GPU. All that differs between the two is behind this.

`host.py` is the one, `gpu/` the other.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from swapd.shared.protocol import Placement
from swapd_client.memory.layout import Remote
from swapd_client.memory.part import Part
from swapd_client.memory.place import Place


class Work(Protocol):
    """What a processor was asked to do under a lease, and had not done when that was released."""

    def is_pending(self) -> bool:
        """Whether it is still at it. Does not block."""

    def is_over(self) -> bool:
        """Whether it is known to have done all of it. Then nothing more may be asked of this."""


class Arrival(Protocol):
    """What is told of bytes that are coming in."""

    def has_come(self, part: Part, place: Placement) -> bool:
        """Whether all of it is there."""

    def wait(self, part: Part, place: Placement, chunks: int | None) -> None:
        """Block until the first `chunks` are there, or all of it. Raises if that will not be, or
        takes too long."""


class Processor(Protocol):
    """Of one session. Thread-safe."""

    #: What private memory of a process's components is called there; "" on the host.
    key: str
    #: Whether work that was asked for may go on when a lease under it is released.
    works_late: bool
    #: Whether private copies take memory of the kind that the daemon lends, and may find none.
    memory_is_scarce: bool

    @property
    def index(self) -> int | None:
        """Its number in this process, for torch; None on the host. Raises: DeviceUnavailable."""

    def reserve(self, nbytes: int, before: Place | None, *, writable: bool) -> Place:
        """A range for so many bytes; `before`: one that was private memory, to be taken over.

        Raises: DeviceUnavailable, DeviceFailed.
        """

    def fits(self, where: Place) -> bool:
        """Whether a component of `where.nbytes` can be mapped in what is reserved there."""

    def fetch(self, spans: Sequence[Remote]) -> None:
        """Copy what this process has there of its own. Blocks. Raises: DeviceFailed."""

    # --- work ----------------------------------------------------------------------------

    def current_streams(self) -> tuple[int, ...]:
        """The stream on which this thread works; none on the host."""

    def mark(self, streams: Iterable[int], before: Work | None) -> Work | None:
        """What it was asked to do on `streams` by now, and what is left of `before`, which is over.

        None if all that is done. Does not block. Streams may be destroyed afterwards.
        """

    def after(self, work: Work, then: Callable[[], None]) -> None:
        """Call `then` in a thread when `work` is done."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left that `after` was told of; whether that came about."""

    def wait_on(self, stream: int, slot: int, target: int) -> bool:
        """Have a stream wait for a word on the board; False if the caller has to wait itself."""

    # --- memory --------------------------------------------------------------------------

    def bring_in(self, placed: Sequence[tuple[Part, Placement]], arrival: Arrival) -> None:
        """Have these behind their ranges, each once all of its bytes are there. Blocks.

        Raises: DeviceFailed, SessionEnded, and what `arrival` raises.
        """

    def attempt(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Make a call that only a GPU's driver can refuse; whether it did not. It is logged."""

    def before_revoking(self, part: Part, generation: int) -> None:
        """The chunks of `generation` are to be taken from it, in the lifeline's thread."""

    def drop(self, parts: Iterable[Part], numbers: tuple[int, ...]) -> bool:
        """Have none of `parts` on these files of the daemon's memory; whether that worked."""

    def cut_off(self, parts: Iterable[Part], end: Callable[[], None]) -> None:
        """Others are about to use the chunks of these clean parts: be on none of them.

        `end()` ends the session, and all its waits.
        """

    def before_private(self, parts: Iterable[Part]) -> None:
        """Some of these are about to become private memory."""

    def let_go_of(self, parts: Iterable[Part]) -> None:
        """These are about to, or their bytes are not kept: what can be is no longer on chunks."""

    def close(self) -> None:
        """Let go of what can be. All words on the board must have been raised before."""
