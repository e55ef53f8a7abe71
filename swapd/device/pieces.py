"""Pure arithmetic on chunks: copies in pieces, files, and the zeros behind each component."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from swapd.device.base import DeviceError
from swapd.shared.protocol import Ranges, Runs

#: More bytes than any component has.
_BEYOND = 1 << 62


class Piece(NamedTuple):
    """The unit of one copy. Bytes; `offset` is in the arena, `done` in the component."""

    offset: int
    done: int
    nbytes: int


def cut(runs: Runs, nbytes: int, chunk: int) -> list[Piece]:
    """`nbytes` bytes, one piece for each run of `runs`.

    Raises: DeviceError if they do not fit.
    """
    pieces = []
    done = 0
    for first, n in runs:
        length = min(n * chunk, nbytes - done)
        if length:
            pieces.append(Piece(first * chunk, done, length))
        done += length
    if done < nbytes:
        raise DeviceError(f"{nbytes} bytes do not fit into chunks {runs}")
    return pieces


def mark(pieces: Iterable[Piece], only: Ranges | None) -> Iterator[tuple[Piece, bool]]:
    """The same bytes, cut where `only` begins and ends; each piece with whether `only` has it."""
    if only is None:
        yield from ((piece, True) for piece in pieces)
        return
    ranges = iter((*only, (_BEYOND, 0)))
    start, length = next(ranges)
    for offset, done, nbytes in pieces:
        at = done
        while at < done + nbytes:
            while start + length <= at:
                start, length = next(ranges)
            inside = start <= at
            end = min(start + length if inside else start, done + nbytes)
            yield Piece(offset + at - done, at, end - at), inside
            at = end


def split(pieces: Iterator[Piece] | list[Piece], most: int) -> Iterator[Piece]:
    """The same bytes in pieces of at most `most`; each run starts a new piece."""
    for offset, done, nbytes in pieces:
        for at in range(0, nbytes, most):
            yield Piece(offset + at, done + at, min(most, nbytes - at))


def numbers(runs: Runs) -> list[int]:
    """The chunks of `runs`, one by one."""
    return [chunk for first, n in runs for chunk in range(first, first + n)]


def files_of(runs: Runs, chunks_per_file: int) -> list[int]:
    """The files of `runs`, in order."""
    return list(dict.fromkeys(chunk // chunks_per_file for chunk in numbers(runs)))


def whole_files(runs: Runs, chunks_per_file: int) -> list[int]:
    """The files all of whose chunks are in `runs`."""
    chunks = set(numbers(runs))
    return [
        file
        for file in files_of(runs, chunks_per_file)
        if chunks.issuperset(range(file * chunks_per_file, (file + 1) * chunks_per_file))
    ]


def runs_of(chunks: Iterable[int]) -> Runs:
    """These chunks, neighbours as one run."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and sum(runs[-1]) == chunk:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((chunk, 1))
    return tuple(runs)


class Tails:
    """The offset in each chunk of a new arena where its zeros begin.

    A worker maps its last chunk as a whole, so bytes of an earlier component there must be zeroed;
    but only as far as there are any. So small components in large chunks come and go at no extra
    cost.
    """

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._ends = [0] * chunks
        #: Whether workers may write to chunks, and so beyond their components.
        self.writable = False

    def begin(self, whole: list[Piece]) -> Piece | None:
        """Before copying these pieces in, one for each run: return the range to zero after them."""
        if not whole:
            return None
        chunk, end = self._last(whole)
        left = self._chunk_bytes if self.writable else self._ends[chunk]
        for piece in whole:
            first = piece.offset // self._chunk_bytes
            last = (piece.offset + piece.nbytes - 1) // self._chunk_bytes
            for number in range(first, last + 1):
                self._ends[number] = self._chunk_bytes
        return Piece(chunk * self._chunk_bytes + end, 0, left - end) if left > end else None

    def end(self, whole: list[Piece]) -> None:
        """The pieces have arrived, and the range is zeroed."""
        if whole:
            chunk, end = self._last(whole)
            self._ends[chunk] = end

    def _last(self, whole: list[Piece]) -> tuple[int, int]:
        """The last chunk, and the offset in it where the bytes end."""
        end = whole[-1].offset + whole[-1].nbytes
        chunk = (end - 1) // self._chunk_bytes
        return chunk, end - chunk * self._chunk_bytes
