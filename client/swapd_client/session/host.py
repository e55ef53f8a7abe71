"""The CPU computes on the daemon's memory itself: work ends at once, and memory never runs out."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from swapd.shared.protocol import Placement, Welcome
from swapd_client.memory.layout import Remote
from swapd_client.memory.mapping import Range
from swapd_client.memory.part import Part
from swapd_client.memory.place import Place
from swapd_client.session.files import Files
from swapd_client.session.processor import Arrival, Work


class Host:
    """See `processor.Processor`."""

    key = ""
    works_late = False
    memory_is_scarce = False
    index = None

    def __init__(self, welcome: Welcome, files: Files, lock: "threading.RLock") -> None:
        """`lock` guards the replacement of a part's host copy."""
        self._chunk_bytes = welcome.chunk_bytes
        self._files = files
        self._lock = lock

    def reserve(self, nbytes: int, before: Place | None, *, writable: bool) -> Range:
        assert before is None or isinstance(before, Range)
        return Range(nbytes, self._chunk_bytes, self._files, writable=writable, before=before)

    def fits(self, where: Place) -> bool:
        """The last chunk is mapped only as far as there is room."""
        return True

    def fetch(self, spans: Sequence[Remote]) -> None:
        raise AssertionError("there is no such memory")

    def current_streams(self) -> tuple[int, ...]:
        return ()

    def mark(self, streams: Iterable[int], before: Work | None) -> None:
        return None

    def everything(self) -> None:
        return None

    def after(self, work: Work, then: Callable[[], None]) -> None:
        raise AssertionError("there is no such work")

    def drain(self, timeout_s: float) -> bool:
        return True

    def wait_on(self, stream: int, slot: int, target: int) -> bool:
        return False

    def bring_in(self, placed: Sequence[tuple[Part, Placement]], arrival: Arrival) -> None:
        """Map them. Mapping costs little, so the daemon grants them only when they have arrived."""
        for part, place in placed:
            part.where.show(place.generation, place.runs)

    def attempt(self, call: Callable[..., None], *arguments: Any) -> bool:
        call(*arguments)
        return True

    def before_revoking(self, part: Part, generation: int) -> None:
        """No-op: a waiting thread uses nothing before the board's word has come."""

    def drop(self, parts: Iterable[Part], numbers: tuple[int, ...]) -> bool:
        """No-op: files of the host's memory are lent as holes in them, not as a whole."""
        return True

    def cut_off(self, parts: Iterable[Part], end: Callable[[], None]) -> None:
        """Replace the chunks by the host copy, so that running computations find the same bytes."""
        for part in parts:
            with self._lock:
                if part.where.shown:
                    assert part.master is not None
                    part.where.make_private(part.master, keep_shown=False)
        end()

    def before_private(self, parts: Iterable[Part]) -> None:
        """No-op."""

    def let_go_of(self, parts: Iterable[Part]) -> None:
        """No-op: each range changes from its chunks to its host copy in one step."""

    def close(self) -> None:
        """No-op."""
