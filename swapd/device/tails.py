"""Tracks how far each chunk was written, beyond the component in it. Pure.

A worker maps its last chunk as a whole, so bytes of an earlier component there must be zeroed; but
only as far as there are any. So small components in large chunks come and go at no extra cost.
"""

from swapd.device.pieces import Piece, numbers
from swapd.shared.protocol import Runs


class Tails:
    """The offset in each chunk where its zeros begin."""

    def __init__(self, chunks: int, chunk_bytes: int, *, zeroed: bool) -> None:
        self._chunk_bytes = chunk_bytes
        self._ends = [0 if zeroed else chunk_bytes] * chunks
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

    def zeroed(self, runs: Runs) -> None:
        """These chunks are all zeros."""
        for chunk in numbers(runs):
            self._ends[chunk] = 0

    def _last(self, whole: list[Piece]) -> tuple[int, int]:
        """The last chunk, and the offset in it where the bytes end."""
        end = whole[-1].offset + whole[-1].nbytes
        chunk = (end - 1) // self._chunk_bytes
        return chunk, end - chunk * self._chunk_bytes
