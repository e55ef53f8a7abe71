"""A GPU computes; its work may still run after the release of a lease.

CUDA is unused until a component is registered, because a process may connect first and fork then.
torch is used only if the process has loaded it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from swapd.device.base import numbers
from swapd.shared import vm
from swapd.shared.board import Board
from swapd.shared.protocol import Placement, Welcome
from swapd_client.errors import DeviceFailed
from swapd_client.memory.layout import RemoteBytes, through_mapping
from swapd_client.memory.part import Part
from swapd_client.memory.place import Place
from swapd_client.session.gpu.card import Card
from swapd_client.session.gpu.mapping import GpuRange
from swapd_client.session.gpu.releases import GpuWork, Releases
from swapd_client.session.gpu.streams import Doorbell, current_stream, lasting_stream
from swapd_client.session.life import Files
from swapd_client.session.processor import Arrival, Processor, Work


class Gpu(Processor):
    """One GPU; see `Processor` for the methods."""

    works_late = True
    memory_is_scarce = True

    def __init__(self, welcome: Welcome, files: Files, board: Board) -> None:
        """Does not use the GPU."""
        self.key = welcome.uuid
        self.card = Card(welcome, files)
        self._chunk_bytes = welcome.chunk_bytes
        self._doorbell = Doorbell(self.card, board)
        self._releases = Releases(self.card)

    @property
    def index(self) -> int:
        return self.card.index

    def reserve(self, nbytes: int, before: Place | None, *, writable: bool) -> GpuRange:
        assert before is None or isinstance(before, GpuRange)
        return GpuRange(nbytes, self.card, writable=writable, before=before)

    def fits(self, where: Place) -> bool:
        assert isinstance(where, GpuRange)
        return vm.round_up(where.nbytes, self._chunk_bytes) <= where.reserved

    def fetch(self, spans: Sequence[RemoteBytes]) -> None:
        self.card.fetch(spans)

    def save(self, address: int, nbytes: int, fd: int) -> None:
        def fetch(target: int) -> None:
            self.card.fetch([RemoteBytes(target, address, nbytes)])

        through_mapping(fd, nbytes, fetch, writable=True)

    # --- work ----------------------------------------------------------------------------

    def current_streams(self) -> tuple[int, ...]:
        return (current_stream(self.card.index),) if self.card.opened else ()

    def lasting_stream(self) -> int | None:
        return lasting_stream(self.card.index) if self.card.opened else None

    def mark(
        self, streams: Iterable[int], before: Work | None, queued: Collection[int]
    ) -> GpuWork | None:
        assert before is None or isinstance(before, GpuWork)
        return self._releases.mark(streams, before, queued) if self.card.opened else None

    def everything(self) -> GpuWork | None:
        return self._releases.everything() if self.card.opened else None

    def after(self, work: Work, then: Callable[[], None]) -> None:
        assert isinstance(work, GpuWork)
        self._releases.after(work, then)

    def drain(self, timeout_s: float) -> bool:
        return self._releases.drain(timeout_s)

    def wait_on(self, stream: int, slot: int, target: int) -> bool:
        return self._doorbell.wait(stream, slot, target)

    # --- memory --------------------------------------------------------------------------

    def bring_in(self, placed: Sequence[tuple[Part, Placement]], arrival: Arrival) -> None:
        """Map chunks during their copy, because the driver's calls take as long as part of the
        copy.

        First map all chunks, then make them accessible as they fill. After the last byte, only the
        last chunk's calls remain.
        """
        coming = []
        for part, place in placed:
            if arrival.has_come(place):
                part.where.show(place.generation, place.runs)
            else:
                coming.append((part, place))
        coming.sort(key=lambda one: one[1].generation)  # the order of the copies
        try:
            for part, place in coming:
                _range_of(part).put(place.generation, place.runs)
            for part, place in coming:
                for chunks in _halves(len(numbers(place.runs))):
                    arrival.wait(part, place, chunks)
                    _range_of(part).allow(place.generation, chunks)
                arrival.wait(part, place, None)
                part.where.show(place.generation, place.runs)
        except BaseException:
            for part, place in coming:
                if not _range_of(part).is_lent(place.generation):  # an early lease may use it
                    self.attempt(part.where.revoke, place.generation)
            raise

    def attempt(self, call: Callable[..., None], *arguments: Any) -> bool:
        try:
            call(*arguments)
        except DeviceFailed as exc:
            self.card.complain(exc)
            return False
        return True

    def before_revoking(self, part: Part, generation: int) -> None:
        if part.holders and _range_of(part).is_lent(generation):
            self.card.settle()  # it did not arrive, but work on it may be running

    def drop(self, parts: Iterable[Part], numbers: tuple[int, ...]) -> bool:
        dropped = all([self.attempt(part.where.drop, numbers) for part in parts])
        return self.attempt(self.card.drop, numbers) and dropped

    def cut_off(self, parts: Iterable[Part], end: Callable[[], None]) -> None:
        end()  # first: waiting streams go on, and their work ends
        self.card.settle()
        for part in parts:
            self.attempt(part.where.revoke)

    def free_unused(self, parts: Collection[Part]) -> None:
        """Mutable components stay on chunks with later bytes than their host copies."""
        needed: set[int] = set()
        for part in parts:
            where = _range_of(part)
            if part.holders or (part.mutable and not part.incomplete and where.has_latest):
                needed.update(numbers(part.placed.runs) if part.placed else ())
            else:
                self.attempt(where.let_go)
        self.attempt(self.card.drop_all, needed)

    def leave(self, part: Part, *, keep_shown: bool) -> None:
        where = _range_of(part)
        if keep_shown and part.has_contents and where.has_latest:
            where.make_private(None, keep_shown=True)
        else:
            where.leave()
            part.lost = where.generation if part.scratch == "dropped" else part.lost

    def before_private(self, parts: Iterable[Part]) -> None:
        if any(part.holders for part in parts):
            self.card.settle()

    def let_go_of(self, parts: Iterable[Part]) -> None:
        """Free the memory of a dead daemon for the private copies."""
        for part in parts:
            self.attempt(part.where.revoke)
        self.attempt(self.card.drop_all)

    def close(self) -> None:
        self._doorbell.close()
        ended = self._releases.close()
        self.card.close(keep_context=not ended)


def _range_of(part: Part) -> GpuRange:
    assert isinstance(part.where, GpuRange)
    return part.where


def _halves(chunks: int) -> Iterator[int]:
    """Yield half of the chunks, half of the rest, and so on, but not the last, to save calls."""
    done = 0
    while (rest := chunks - done) > 1:
        done += rest // 2
        yield done
