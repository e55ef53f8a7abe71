"""The processor that computes on the weights: the CPU here, or a GPU (`gpu/`), which overrides it.

The CPU computes on the daemon's memory itself: work ends at once, and memory never runs out.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from swapd.shared import vm
from swapd.shared.protocol import Placement, Welcome
from swapd_client.memory.layout import Remote
from swapd_client.memory.mapping import Range
from swapd_client.memory.part import Part
from swapd_client.memory.place import Place
from swapd_client.session.life import Files


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
        """Block until the first `chunks` are there, or all. Raises if they never will be."""


class Processor:
    """The processor of one session. Thread-safe."""

    #: Key of the process's private memory there; "" on the host.
    key = ""
    #: Whether queued work may go on after the release of its lease.
    works_late = False
    #: Whether private copies use the same kind of memory as the daemon's, and may find none.
    memory_is_scarce = False

    def __init__(self, welcome: Welcome, files: Files, lock: "threading.RLock") -> None:
        """`lock` guards the replacement of a part's host copy."""
        self._chunk_bytes = welcome.chunk_bytes
        self._files = files
        self._lock = lock

    @property
    def index(self) -> int | None:
        """Its number in this process, for torch; None on the host. Raises: DeviceFailed."""
        return None

    def reserve(self, nbytes: int, before: Place | None, *, writable: bool) -> Place:
        """Reserve a range of `nbytes`; `before`: a private range to take over.

        Raises: DeviceFailed.
        """
        assert before is None or isinstance(before, Range)
        return Range(nbytes, self._chunk_bytes, self._files, writable=writable, before=before)

    def fits(self, where: Place) -> bool:
        """Whether the reserved range has room for the chunks of `where.nbytes`."""
        return True  # the last chunk is mapped only as far as there is room

    def fetch(self, spans: Sequence[Remote]) -> None:
        """Copy this process's own memory from there. Blocks. Raises: DeviceFailed."""
        raise AssertionError("there is no such memory")

    def save(self, address: int, nbytes: int, fd: int) -> None:
        """Copy a component's private memory to a file. Blocks. Raises: DeviceFailed."""
        vm.write(fd, 0, address, nbytes)

    # --- work ----------------------------------------------------------------------------

    def current_streams(self) -> tuple[int, ...]:
        """The stream on which this thread works; none on the host."""
        return ()

    def lasting_stream(self) -> int | None:
        """The stream on which this thread works, if it is never destroyed."""
        return None

    def mark(
        self, streams: Iterable[int], before: Work | None, queued: Collection[int]
    ) -> Work | None:
        """Work queued on `streams` until now, and the rest of `before`, which becomes invalid.

        None if all of it is done. Does not block. Streams may be destroyed afterwards, but for
        those of `queued`, on which the work was queued before.
        """
        return None

    def everything(self) -> Work | None:
        """All work of this process there, as of now; None if there cannot be any."""
        return None

    def after(self, work: Work, then: Callable[[], None]) -> None:
        """Call `then` in a thread when `work` is done."""
        raise AssertionError("there is no such work")

    def drain(self, timeout_s: float) -> bool:
        """Wait until all work given to `after` is done; return whether it is."""
        return True

    def wait_on(self, stream: int, slot: int, target: int) -> bool:
        """Make a stream wait for a word on the board; False if the caller must wait itself."""
        return False

    # --- memory --------------------------------------------------------------------------

    def bring_in(self, placed: Sequence[tuple[Part, Placement]], arrival: Arrival) -> None:
        """Map these into their ranges, each once all of its bytes are there. Blocks.

        Raises: DeviceFailed, SessionEnded, and errors of `arrival`.
        """
        for part, place in placed:  # the daemon grants them only when they have arrived
            part.where.show(place.generation, place.runs)

    def attempt(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Make a driver's call that may be refused; return whether it succeeded. Logs errors."""
        call(*arguments)
        return True

    def before_revoking(self, part: Part, generation: int) -> None:
        """The chunks of `generation` will be revoked, in the lifeline's thread."""

    def drop(self, parts: Iterable[Part], numbers: tuple[int, ...]) -> bool:
        """Unmap these files of the daemon's memory from all `parts`; return whether it worked."""
        return True  # files of the host's memory are lent as holes in them, not as a whole

    def cut_off(self, parts: Iterable[Part], end: Callable[[], None]) -> None:
        """Unmap all chunks of these clean parts, because others are about to use them.

        `end()` ends the session, and all its waits.
        """
        for part in parts:  # running computations find the same bytes in the host copy
            with self._lock:
                if part.where.shown:
                    assert part.master is not None
                    part.where.make_private(part.master, keep_shown=False)
        end()

    def free_unused(self, parts: Collection[Part]) -> None:
        """The daemon is gone: free its memory where no lease of these uses it, if it is scarce."""

    def leave(self, part: Part, *, keep_shown: bool) -> None:
        """Unmap all of the daemon that is gone: see `Registry.leave`."""
        bytes_of = part.master if part.has_contents else None
        part.where.make_private(bytes_of, keep_shown=keep_shown)

    def before_private(self, parts: Iterable[Part]) -> None:
        """Some of these are about to become private memory."""

    def let_go_of(self, parts: Iterable[Part]) -> None:
        """These are about to become private, or are dropped: unmap their chunks if possible."""

    def close(self) -> None:
        """Free all that can be freed. All words on the board must have been raised before."""
