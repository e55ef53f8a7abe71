"""The GPU work under leases, by marks in the streams that it was queued on."""

from collections.abc import Iterable

from swapd_client.leases.record import Record
from swapd_client.session.life import Life
from swapd_client.session.processor import Processor, Work


class Marks:
    def __init__(self, processor: Processor, life: Life) -> None:
        self._processor = processor
        self._life = life

    def set(self, record: Record, *, later: bool = False) -> None:
        """Mark the GPU work queued under a lease, on the current stream and its named streams.

        Does not block. Afterwards only events are used, because a stream may be destroyed. `later`:
        mark only at the end of the lease, which will be kept and probably taken again. A mark costs
        four driver calls, and a decode loop would make one at every step. Such a lease waits for
        the work of all its steps.
        """
        if later and not record.streams:
            lasting = self._processor.lasting_stream()
            if lasting is not None:
                record.queued[lasting] = None
                return
        self._set(record, self._processor.current_streams())

    def set_queued(self, record: Record) -> None:
        """Mark the work under a kept lease that has no mark yet."""
        if record.queued:
            self._set(record, ())

    def _set(self, record: Record, current: Iterable[int]) -> None:
        streams = dict.fromkeys((*record.streams, *current))
        if not (record.unmarked or self._life.left_to_parent):
            record.unmarked = True  # until all is assigned: an interrupt may come
            record.work = self._processor.mark(streams, record.work, record.queued)
            record.streams.clear()
            record.queued.clear()
            record.unmarked = False

    def is_pending(self, record: Record) -> bool:
        self.set_queued(record)
        return record.work is not None and record.work.is_pending()

    def under(self, record: Record) -> Work | None:
        """Return the work that the end of a lease waits for, or None."""
        self.set_queued(record)
        if record.unmarked:
            return self._processor.everything()
        if record.work is not None and record.work.is_over():
            record.work = None
        return record.work
