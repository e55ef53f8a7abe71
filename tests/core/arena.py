"""The memory outside a `Residency`, byte by byte: what copies do to chunks and masters.

A chunk has one byte. Each byte is told from all others, so that one that is lost, put where
it does not belong, or overwritten before it was saved is noticed. Copies go on at any pace;
a copy in waits for those it is `behind`, and for no other.
"""

from dataclasses import dataclass, field

from swapd.core.actions import CopyIn, CopyOut
from swapd.shared.protocol import Runs

#: (uid, place in the component, how often it was written)
Byte = tuple[int, int, int]


def numbers(runs: Runs) -> list[int]:
    """The chunks of `runs`, in order."""
    return [i for first, n in runs for i in range(first, first + n)]


@dataclass(eq=False)
class Copy:
    order: CopyIn | CopyOut
    chunks: list[int]
    done: int = 0
    #: Of a copy out: chunks that copies behind it have overwritten, and whether one of those
    #: has come to its end, so that there is no undoing it.
    overwritten: set[int] = field(default_factory=set)
    taken_for_good: bool = False

    @property
    def at(self) -> int:
        """The chunk that is next."""
        return self.chunks[self.done]

    @property
    def unsaved(self) -> list[int]:
        return self.chunks[self.done :]


class Arena:
    """The bytes on a device, in masters, and in flight."""

    def __init__(self, chunks: int) -> None:
        self.chunks: list[Byte | None] = [None] * chunks
        #: By uid: what the master holds, and what the component's bytes ought to be.
        self.masters: dict[int, list[Byte]] = {}
        self.meant: dict[int, list[Byte]] = {}
        self._copies: dict[int, Copy] = {}
        self._writes = 0

    def make_master(self, uid: int, nbytes: int) -> None:
        self.masters[uid] = [(uid, i, 0) for i in range(nbytes)]
        self.meant[uid] = list(self.masters[uid])

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
        self._copies[order.generation] = Copy(order, numbers(order.runs))

    def step(self, generation: int) -> bool:
        """Copy one byte, if there is one left and it may be copied; whether it was."""
        copy = self._copies[generation]
        if not copy.unsaved:
            return False
        master = self.masters[copy.order.uid]
        if isinstance(copy.order, CopyOut):
            byte = self.chunks[copy.at]
            assert byte is not None
            master[copy.done] = byte
        else:
            saves = self._saves(copy)
            if any(copy.at in save.unsaved for save in saves):
                return False
            for save in saves:
                save.overwritten.add(copy.at)
            self.chunks[copy.at] = master[copy.done]
        copy.done += 1
        return True

    def finish(self, generation: int) -> None:
        """Copy what is left. What it is behind saves as much as that takes."""
        copy = self._copies[generation]
        while copy.unsaved:
            if not self.step(generation):
                for save in self._saves(copy):
                    self.step(save.order.generation)
        if isinstance(copy.order, CopyIn):
            for save in self._saves(copy):
                save.taken_for_good = True
        else:
            assert self.is_saved(copy.order.uid), f"{copy.order}: a byte was overwritten"
        del self._copies[generation]

    def fail(self, generation: int, *, restore: bool) -> bool:
        """Leave a copy where it is; return whether that damages a component for good.

        What copies behind a failed copy out have overwritten is brought back from the
        master, if it may be and `restore`. Those copies have failed before.
        """
        copy = self._copies.pop(generation)
        if isinstance(copy.order, CopyIn) or not copy.overwritten:
            return False
        if copy.taken_for_good or not restore:
            return True
        master = self.masters[copy.order.uid]
        for chunk in copy.overwritten:
            self.chunks[chunk] = master[copy.chunks.index(chunk)]
        return False

    def _saves(self, copy: Copy) -> list[Copy]:
        """The copies out that it is behind, and that have to do with its next chunk."""
        assert isinstance(copy.order, CopyIn)
        saves = [self._copies[g] for g in copy.order.behind if g in self._copies]
        return [s for s in saves if not copy.unsaved or copy.at in s.chunks]
