"""How often waiters are overtaken: a bound that lets others share what is in, or coming. Pure.

Who needs memory waits in order. Who needs none may go before, also if what it shares must go for
somebody that came earlier; but each waiter is overtaken by a number of later ones at most.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable

from swapd.core.records import Waiter


class Overtaken:
    """Counts, for each waiter in the queue, the admissions of waiters that came after it.

    Those of a higher priority do not count: the user wants them first.
    """

    def __init__(self) -> None:
        #: The numbers in order of arrival of those that were admitted, sorted, by priority.
        self._admitted: dict[int, list[int]] = {}

    def note(self, w: Waiter) -> None:
        """`w` is admitted before somebody that came earlier."""
        insort(self._admitted.setdefault(w.priority, []), w.seq)

    def forget(self, before: int | None) -> None:
        """Forget the admissions that nobody counts: the first in the queue has this number, or None
        if the queue is empty."""
        if before is None:
            self._admitted.clear()
            return
        for priority, seqs in list(self._admitted.items()):
            del seqs[: bisect_right(seqs, before)]
            if not seqs:
                del self._admitted[priority]

    def times(self, w: Waiter) -> int:
        """How often `w` was overtaken so far."""
        return sum(
            len(seqs) - bisect_right(seqs, w.seq)
            for priority, seqs in self._admitted.items()
            if priority <= w.priority
        )

    def is_fair(self, w: Waiter, queued: Iterable[Waiter], most: int) -> bool:
        """Whether `w` may be admitted before each of these that came earlier; `most`: the bound of
        those that have none of their own."""
        return all(
            self.times(y) < (most if y.overtake is None else y.overtake)
            for y in queued
            if y.seq < w.seq and y.priority >= w.priority
        )
