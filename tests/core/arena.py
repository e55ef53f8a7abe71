"""The memory outside a `Residency`, byte by byte: the effect of copies on chunks and host copies.

A chunk has one byte. All bytes differ, so the tests notice a byte that is lost, misplaced, or
overwritten before it was saved. Copies advance at any pace. The host copy of scratch holds its
saved bytes only; a load fills the rest with zeros.
"""

from dataclasses import dataclass, field

from swapd.core.actions import CopyIn, CopyOut
from swapd.shared.protocol import Ranges, Runs

#: (uid, place in the component, number of the write)
Byte = tuple[int, int, int]

#: A byte that nobody wrote; and a byte of a host copy that was never saved: no load may copy it.
ZERO: Byte = (0, 0, 0)
UNSAVED: Byte = (-1, 0, 0)


def numbers(runs: Runs) -> list[int]:
    """The chunks of `runs`, in order."""
    return [i for first, n in runs for i in range(first, first + n)]


def places(only: Ranges | None, nbytes: int) -> list[int]:
    """The bytes of a component that are in `only`, in order; None: all."""
    ranges = ((0, nbytes),) if only is None else only
    found = [i for start, n in ranges for i in range(start, start + n)]
    assert found == sorted(set(found)), f"{only}: not in order, or a byte twice"
    assert not found or found[-1] < nbytes, f"{only}: beyond the end"
    return found


@dataclass(eq=False)
class Copy:
    order: CopyIn | CopyOut
    chunks: list[int]
    done: int = 0
    #: The places to copy; all others are zeroed, or stay unchanged in the host copy.
    copied: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.copied = places(self.order.only, self.order.nbytes)

    @property
    def at(self) -> int:
        """The next chunk."""
        return self.chunks[self.done]

    @property
    def is_done(self) -> bool:
        return self.done == len(self.chunks)


class Arena:
    """The bytes on a device, in host copies, and in flight."""

    def __init__(self, chunks: int) -> None:
        self.chunks: list[Byte | None] = [None] * chunks
        #: By uid: the bytes of the host copy, and the bytes that the component should have.
        self.masters: dict[int, list[Byte]] = {}
        self.meant: dict[int, list[Byte]] = {}
        #: Of scratch, by uid: the saved bytes, by place; None if it begins anew.
        self.saved: dict[int, dict[int, Byte] | None] = {}
        self._copies: dict[int, Copy] = {}
        self._writes = 0

    def make_master(self, uid: int, nbytes: int) -> None:
        self.masters[uid] = [(uid, i, 0) for i in range(nbytes)]
        self.meant[uid] = list(self.masters[uid])

    def share(self, uid: int, original: int) -> None:
        self.masters[uid] = list(self.masters[original])
        self.meant[uid] = list(self.masters[uid])

    def make_scratch(self, uid: int, nbytes: int, *, filled: bool) -> None:
        """`filled`: it has contents to begin with."""
        self.make_master(uid, nbytes)
        self.saved[uid] = dict(enumerate(self.masters[uid])) if filled else None
        if not filled:
            self.masters[uid] = [UNSAVED] * nbytes

    def begins_anew(self, uid: int) -> bool:
        """Whether it is scratch of which no load restores a byte."""
        return uid in self.saved and self.saved[uid] is None

    def forget(self, uid: int) -> None:
        """The contents of scratch are gone, and its saved bytes are outdated."""
        self.saved[uid] = None

    def is_zero(self, runs: Runs) -> bool:
        return all(self.chunks[i] == ZERO for i in numbers(runs))

    def write(self, uid: int, runs: Runs) -> None:
        """The worker writes all of its component."""
        self._writes += 1
        self.meant[uid] = [(uid, i, self._writes) for i in range(len(self.meant[uid]))]
        for chunk, byte in zip(numbers(runs), self.meant[uid], strict=True):
            self.chunks[chunk] = byte

    def holds(self, uid: int, runs: Runs) -> bool:
        """Whether the bytes of a component are on its chunks."""
        return [self.chunks[i] for i in numbers(runs)] == self.meant[uid]

    def is_saved(self, uid: int) -> bool:
        return self.masters[uid] == self.meant[uid]

    def start(self, order: CopyIn | CopyOut) -> None:
        uid = order.uid
        if isinstance(order, CopyIn) and uid in self.saved:
            saved = self.saved[uid] or {}
            self.meant[uid] = [saved.get(i, ZERO) for i in range(order.nbytes)]
        self._copies[order.generation] = Copy(order, numbers(order.runs))

    def step(self, generation: int) -> bool:
        """Copy the next byte, if there is one; return whether it was."""
        copy = self._copies[generation]
        if copy.is_done:
            return False
        master = self.masters[copy.order.uid]
        if isinstance(copy.order, CopyOut):
            byte = self.chunks[copy.at]
            assert byte is not None
            if copy.done in copy.copied:
                master[copy.done] = byte
        else:
            self.chunks[copy.at] = master[copy.done] if copy.done in copy.copied else ZERO
        copy.done += 1
        return True

    def finish(self, generation: int) -> int:
        """Copy the rest; return how many bytes the whole copy has copied."""
        copy = self._copies[generation]
        while self.step(generation):
            pass
        if isinstance(copy.order, CopyOut):
            uid = copy.order.uid
            lost = [i for i in copy.copied if self.masters[uid][i] != self.meant[uid][i]]
            assert not lost, f"{copy.order}: a byte was overwritten"
            if uid in self.saved:
                self.saved[uid] = {i: self.meant[uid][i] for i in copy.copied}
        del self._copies[generation]
        return len(copy.copied)

    def fail(self, generation: int) -> None:
        """Stop a copy where it is."""
        del self._copies[generation]
