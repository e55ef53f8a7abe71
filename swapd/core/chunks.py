"""The free chunks of the arena, by number, in runs of neighbours: each needs one copy and one
mapping. Pure."""

from bisect import bisect_left, bisect_right, insort

from swapd.shared.protocol import Runs


def count(runs: Runs) -> int:
    return sum(n for _, n in runs)


def without(runs: Runs, gone: Runs) -> Runs:
    """Neighbours are merged."""
    numbers = {i for first, n in gone for i in range(first, first + n)}
    left: list[tuple[int, int]] = []
    for i in (i for first, n in runs for i in range(first, first + n) if i not in numbers):
        if left and sum(left[-1]) == i:
            left[-1] = (left[-1][0], left[-1][1] + 1)
        else:
            left.append((i, 1))
    return tuple(left)


class ChunkPool:
    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        #: Free runs by first chunk; neighbours are always merged.
        self._starts: list[int] = [0] if total else []
        self._lengths: list[int] = [total] if total else []
        #: The same as (length, -first chunk), sorted: of equal lengths, the first in memory is
        #: last.
        self._by_length: list[tuple[int, int]] = [(total, 0)] if total else []
        #: Chunks that several have taken: the number of takers beside the first.
        self.shared: dict[Runs, int] = {}

    def __repr__(self) -> str:
        return f"<ChunkPool {self.free}/{self.total} free in {len(self._starts)} runs>"

    def take(self, need: int, prefer: Runs = ()) -> Runs:
        """Take the chunks of `prefer` if all are free (so that a worker whose component returns
        keeps its page tables), else the smallest run that is enough, else the largest runs."""
        if need > self.free:
            raise ValueError(f"{need} chunks asked, {self.free} free")
        if prefer and count(prefer) == need and all(self._is_free(*run) for run in prefer):
            chosen = prefer
        else:
            chosen = self._choose(need)
        for first, n in chosen:
            self._cut(first, n)
        self.free -= need
        return chosen

    def share(self, runs: Runs) -> Runs:
        """Take chunks that another has taken: they come free once each taker has given them."""
        self.shared[runs] = self.shared.get(runs, 0) + 1
        return runs

    def give(self, runs: Runs) -> None:
        if self.shared and (others := self.shared.pop(runs, 0)):
            if others > 1:
                self.shared[runs] = others - 1
            return
        for first, n in runs:
            self._insert(first, n)
            self.free += n

    def runs(self) -> Runs:
        return tuple(zip(self._starts, self._lengths, strict=True))

    def _choose(self, need: int) -> Runs:
        i = bisect_left(self._by_length, (need, -self.total))
        if need and i < len(self._by_length):
            n = self._by_length[i][0]
            last = bisect_right(self._by_length, (n, 0)) - 1
            return ((-self._by_length[last][1], need),)
        chosen: list[tuple[int, int]] = []
        for n, minus in reversed(self._by_length):
            if need <= 0:
                break
            chosen.append((-minus, min(n, need)))
            need -= n
        return tuple(chosen)

    def _is_free(self, first: int, n: int) -> bool:
        i = bisect_right(self._starts, first) - 1
        return i >= 0 and first + n <= self._starts[i] + self._lengths[i]

    def _cut(self, first: int, n: int) -> None:
        i = bisect_right(self._starts, first) - 1
        start, length = self._remove(i)
        for piece, m in ((first + n, start + length - first - n), (start, first - start)):
            if m:
                self._put(i, piece, m)

    def _insert(self, first: int, n: int) -> None:
        i = bisect_left(self._starts, first)
        if i < len(self._starts) and first + n > self._starts[i]:
            raise ValueError(f"chunks {first}..{first + n - 1} are free already")
        if i and self._starts[i - 1] + self._lengths[i - 1] > first:
            raise ValueError(f"chunks {first}..{first + n - 1} are free already")
        if i < len(self._starts) and first + n == self._starts[i]:
            n += self._remove(i)[1]
        if i and self._starts[i - 1] + self._lengths[i - 1] == first:
            i -= 1
            first, before = self._remove(i)
            n += before
        self._put(i, first, n)

    def _put(self, i: int, first: int, n: int) -> None:
        self._starts.insert(i, first)
        self._lengths.insert(i, n)
        insort(self._by_length, (n, -first))

    def _remove(self, i: int) -> tuple[int, int]:
        first, n = self._starts.pop(i), self._lengths.pop(i)
        del self._by_length[bisect_left(self._by_length, (n, -first))]
        return first, n
