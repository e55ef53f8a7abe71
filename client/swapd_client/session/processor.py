"""The processor that computes on the weights: here the CPU. The GPU (`gpu/`) overrides it.

The CPU computes on the daemon's memory itself: work ends at once, and memory never runs out.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from swapd.shared import vm
from swapd.shared.protocol import Placement, Welcome
from swapd_client.memory.layout import RemoteBytes
from swapd_client.memory.mapping import Range
from swapd_client.memory.part import Part
from swapd_client.memory.place import Place
from swapd_client.session.life import Files


class Work(Protocol):
    """GPU work of a lease that had not finished at its release."""

    def is_pending(self) -> bool:
        """Whether it still runs. Does not block."""

    def is_over(self) -> bool:
        """Whether it is known to have ended. If so, do not use this object again."""


class Arrival(Protocol):
    def has_come(self, place: Placement) -> bool: ...

    def wait(self, part: Part, place: Placement, chunks: int | None) -> None:
        """Block until the first `chunks` are there, or all. Raises if they never will be."""


class Processor:
    """The processor of one session. Thread-safe."""

    #: Device of the process's private memory; "" on the host.
    key = ""
    #: Whether work may outlast its lease.
    works_late = False
    #: Whether private copies compete with the daemon for memory.
    memory_is_scarce = False

    def __init__(self, welcome: Welcome, files: Files, lock: "threading.RLock") -> None:
        self._chunk_bytes = welcome.chunk_bytes
        self._files = files
        self._lock = lock

    @property
    def index(self) -> int | None:
        """The device's index for torch. Raises: DeviceFailed."""
        return None

    def reserve(self, nbytes: int, before: Place | None, *, writable: bool) -> Place:
        """Reserve a range, or take over the private range `before`. Raises: DeviceFailed."""
        assert before is None or isinstance(before, Range)
        return Range(nbytes, self._chunk_bytes, self._files, writable=writable, before=before)

    def fits(self, where: Place) -> bool:
        """Whether the reserved range has room for the chunks of `where.nbytes`."""
        return True  # the last chunk may be mapped in part

    def fetch(self, spans: Sequence[RemoteBytes]) -> None:
        """Copy memory of this process from the device. Blocks. Raises: DeviceFailed."""
        raise AssertionError("there is no such memory")

    def save(self, address: int, nbytes: int, fd: int) -> None:
        """Copy private memory to a file. Blocks. Raises: DeviceFailed."""
        vm.write(fd, 0, address, nbytes)

    # --- work ----------------------------------------------------------------------------

    def current_streams(self) -> tuple[int, ...]:
        """This thread's stream; empty on the host."""
        return ()

    def lasting_stream(self) -> int | None:
        """This thread's stream, if it is never destroyed, else None."""
        return None

    def mark(
        self, streams: Iterable[int], before: Work | None, queued: Collection[int]
    ) -> Work | None:
        """Return the work on `streams` as of now, with the rest of `before`, which becomes invalid.

        Returns None if all of it is done. Does not block. `queued` are streams with earlier work of
        the lease. They must not be destroyed afterwards; other streams may.
        """
        return None

    def everything(self) -> Work | None:
        """All work of this process; None if there cannot be any."""
        return None

    def after(self, work: Work, then: Callable[[], None]) -> None:
        """Call `then` in a thread when `work` is done."""
        raise AssertionError("there is no such work")

    def drain(self, timeout_s: float) -> bool:
        """Wait until all work given to `after` is done, or return False."""
        return True

    def wait_on(self, stream: int, slot: int, target: int) -> bool:
        """Make a stream wait for a word on the board. If False, the caller must wait itself."""
        return False

    # --- memory --------------------------------------------------------------------------

    def bring_in(self, placed: Sequence[tuple[Part, Placement]], arrival: Arrival) -> None:
        """Map components into their ranges, each when all its bytes have come. Blocks.

        Raises: DeviceFailed, SessionEnded, and the errors of `arrival`.
        """
        for part, place in placed:  # the daemon grants only what has arrived
            part.where.show(place.generation, place.runs)

    def attempt(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Make a driver call that may fail; log its error, and return False then."""
        call(*arguments)
        return True

    def before_revoking(self, part: Part, generation: int) -> None:
        """Prepare for a revocation, in the lifeline's thread."""

    def drop(self, parts: Iterable[Part], numbers: tuple[int, ...]) -> bool:
        """Unmap these files of the daemon's memory; return whether it worked."""
        return True  # host memory is lent as holes in its files, not as whole files

    def cut_off(self, parts: Iterable[Part], end: Callable[[], None]) -> None:
        """Unmap clean parts, whose chunks others are about to use. `end()` ends the session."""
        for part in parts:  # running work finds the same bytes in the host copy
            with self._lock:
                if part.where.shown and part.master is not None:  # None: it leaves just now
                    part.where.make_private(part.master, keep_shown=False)
        end()

    def free_unused(self, parts: Collection[Part]) -> None:
        """After the daemon's death, free scarce memory that no lease uses."""

    def leave(self, part: Part, *, keep_shown: bool) -> None:
        """Unmap all memory of a dead daemon: see `Unbinding`."""
        bytes_of = part.master if part.has_contents else None
        part.where.make_private(bytes_of, keep_shown=keep_shown)

    def before_private(self, parts: Iterable[Part]) -> None: ...

    def let_go_of(self, parts: Iterable[Part]) -> None:
        """Unmap the chunks of parts that become private, or are dropped."""

    def close(self) -> None:
        """Free what can be freed. All words on the board must have been raised before."""
