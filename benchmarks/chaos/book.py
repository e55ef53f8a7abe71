"""The right bytes of a worker's components, shared by the threads and tasks of one process."""

import random
import threading
from collections.abc import Mapping
from functools import cache

from benchmarks.processes import MIB

_BLOCK = 64 << 10


@cache
def pattern(name: str, version: int, nbytes: int) -> bytes:
    """Bytes that no other name or version has, without two equal blocks."""
    block = random.Random(f"{name} {version}").randbytes(_BLOCK - 8)
    count = -(-nbytes // _BLOCK)
    return b"".join(i.to_bytes(8, "little") + block for i in range(count))[:nbytes]


class Part:
    """A component, or a part of a family, of one buffer for each segment."""

    def __init__(self, name: str, segments: tuple[int, ...], *, mutable: bool = False) -> None:
        self.name = name
        self.segments = segments
        self.mutable = mutable
        self.views: dict[str, memoryview] = {}
        #: Versions it may have: during an update some readers see the new one, and some the old
        #: one.
        self.version = self.coming = 0
        #: Held while writing, because another lease of this process may be held at the same time.
        self.lock = threading.Lock()

    def bytes_of(self, segment: int, version: int) -> bytes:
        return pattern(f"{self.name}.{segment}", version, self.segments[segment])

    def buffers(self, version: int) -> dict[str, bytearray]:
        return {str(i): bytearray(self.bytes_of(i, version)) for i in range(len(self.segments))}

    @property
    def nbytes(self) -> int:
        return sum(self.segments)

    def is_right(self, segment: int | None = None, since: int = 0) -> bool:
        """Whether its bytes, or a segment's, are those of one version, `since` or later."""
        which = range(len(self.segments)) if segment is None else [segment]
        versions = range(since, self.coming + 1)
        return any(
            all(self.views[str(i)] == self.bytes_of(i, version) for i in which)
            for version in versions
        )

    def write(self) -> None:
        """Write the bytes of the next version; under a lease."""
        self.coming = self.version + 1
        for i in range(len(self.segments)):
            self.views[str(i)][:] = self.bytes_of(i, self.coming)
        self.version = self.coming


class Book:
    """All components of one worker."""

    def __init__(self, worker: str) -> None:
        self.clean = Part(f"{worker}.clean", (3 * MIB,))
        self.long = Part(f"{worker}.long", (MIB, MIB // 2, 2 * MIB))
        self.mutable = Part(f"{worker}.mutable", (2 * MIB,), mutable=True)
        self.family = f"{worker}.family"
        self.blocks = [
            Part(f"{self.family}/{key}", (nbytes,))
            for key, nbytes in [("rest", MIB), ("0", 2 * MIB), ("1", 2 * MIB), ("2", 2 * MIB)]
        ]

    @property
    def singles(self) -> tuple[Part, ...]:
        return self.clean, self.long, self.mutable

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.singles, *self.blocks)

    def wrong(self) -> list[str]:
        """Names of components whose bytes are not those last written; all of them are private."""
        written = [part for part in self.parts if part.views]
        return [part.name for part in written if not part.is_right(since=part.version)]

    def family_buffers(self) -> Mapping[str, dict[str, bytearray]]:
        return {p.name.rpartition("/")[2]: p.buffers(p.version) for p in self.blocks}
