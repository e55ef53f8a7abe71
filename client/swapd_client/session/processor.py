"""The processor that computes on the weights, the CPU or a GPU: an interface for all differences.

`host.py` implements it for the CPU, `gpu/` for a GPU.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from swapd.shared.protocol import Placement
from swapd_client.memory.layout import Remote
from swapd_client.memory.part import Part
from swapd_client.memory.place import Place


class Work(Protocol):
    """Work queued under a lease that was not done at its release."""

    def is_pending(self) -> bool:
        """Whether it is still running. Does not block."""

    def is_over(self) -> bool:
        """Whether it is known to have ended. If so, do not use this object again."""


class Arrival(Protocol):
    """The state of loading components."""

    def has_come(self, part: Part, place: Placement) -> bool:
        """Whether all of it has arrived."""

    def wait(self, part: Part, place: Placement, chunks: int | None) -> None:
        """Block until the first `chunks` have arrived, or all of it.

        Raises if it never will, or takes too long.
        """


class Processor(Protocol):
    """The processor of one session. Thread-safe."""

    #: Key of the process's private memory there; "" on the host.
    key: str
    #: Whether queued work may go on after the release of its lease.
    works_late: bool
    #: Whether private copies use the same kind of memory as the daemon's, and may find none.
    memory_is_scarce: bool

    @property
    def index(self) -> int | None:
        """Its number in this process, for torch; None on the host. Raises: DeviceUnavailable."""

    def reserve(self, nbytes: int, before: Place | None, *, writable: bool) -> Place:
        """Reserve a range of `nbytes`; `before`: a private range to take over.

        Raises: DeviceUnavailable, DeviceFailed.
        """

    def fits(self, where: Place) -> bool:
        """Whether the reserved range has room for the chunks of `where.nbytes`."""

    def fetch(self, spans: Sequence[Remote]) -> None:
        """Copy this process's own memory from there. Blocks. Raises: DeviceFailed."""

    # --- work ----------------------------------------------------------------------------

    def current_streams(self) -> tuple[int, ...]:
        """The stream on which this thread works; none on the host."""

    def mark(self, streams: Iterable[int], before: Work | None) -> Work | None:
        """Work queued on `streams` until now, and the rest of `before`, which becomes invalid.

        None if all of it is done. Does not block. Streams may be destroyed afterwards.
        """

    def everything(self) -> Work | None:
        """All work of this process there, as of now; None if there cannot be any."""

    def after(self, work: Work, then: Callable[[], None]) -> None:
        """Call `then` in a thread when `work` is done."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until all work given to `after` is done; return whether it is."""

    def wait_on(self, stream: int, slot: int, target: int) -> bool:
        """Make a stream wait for a word on the board; False if the caller must wait itself."""

    # --- memory --------------------------------------------------------------------------

    def bring_in(self, placed: Sequence[tuple[Part, Placement]], arrival: Arrival) -> None:
        """Map these into their ranges, each once all of its bytes are there. Blocks.

        Raises: DeviceFailed, SessionEnded, and errors of `arrival`.
        """

    def attempt(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Make a call that only a GPU's driver can refuse; return whether it succeeded. Logs
        errors.
        """

    def before_revoking(self, part: Part, generation: int) -> None:
        """The chunks of `generation` will be revoked, in the lifeline's thread."""

    def drop(self, parts: Iterable[Part], numbers: tuple[int, ...]) -> bool:
        """Unmap these files of the daemon's memory from all `parts`; return whether it worked."""

    def cut_off(self, parts: Iterable[Part], end: Callable[[], None]) -> None:
        """Unmap all chunks of these clean parts, because others are about to use them.

        `end()` ends the session, and all its waits.
        """

    def before_private(self, parts: Iterable[Part]) -> None:
        """Some of these are about to become private memory."""

    def let_go_of(self, parts: Iterable[Part]) -> None:
        """These are about to become private, or are dropped: unmap their chunks if possible."""

    def close(self) -> None:
        """Free all that can be freed. All words on the board must have been raised before."""
