"""What lies where in a component: storages in order, each aligned. No torch.

A layout is made from a source (buffers here, tensors in `tensors.py`), says how many bytes
the master needs, fills it once, and then points the source at the component's address.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from swapd.shared import vm
from swapd.shared.protocol import Scratch
from swapd_client.errors import InvalidSource

#: Where storages lie: address and bytes of each.
Spans = frozenset[tuple[int, int]]

#: Whatever memoryview takes; numpy arrays too.
Buffer = bytes | bytearray | memoryview

#: Every storage starts at a multiple of this: enough for any vector load.
ALIGN_BYTES = 256


class OtherBytes(Exception):
    """A master that is shared has not the bytes that it was shared as. Nobody outside hears of it:
    the component is registered again, and shares nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r} has other bytes than its files")
        self.name = name


class Layout(Protocol):
    """A source of bytes, and where each of them goes."""

    nbytes: int
    #: Where each segment ends, bytes, ascending; the last at `nbytes`.
    segments: tuple[int, ...]
    #: What the bytes are, if that is known beforehand: who has the same shares its master.
    content: str
    #: Whether it is scratch, and what becomes of what is written there; and then, whether there is
    #: something to fill it with.
    scratch: Scratch
    filled: bool
    #: Whether something with its bytes may be made whenever somebody asks for it.
    has_views: bool

    @property
    def memory(self) -> Collection[int]:
        """Addresses that tell whether two sources share memory that would be moved."""

    def origins(self) -> Iterable[tuple[str, int, int]]:
        """Name, address and bytes of what the source has now: of what is read, or replaced."""

    def digest(self) -> str:
        """A hash of names, kinds and places: equal layouts can share a master's bytes."""

    def fill_file(self, fd: int) -> None:
        """Copy every byte, once, into a file of `nbytes`; map it no longer than that takes."""

    def matches(self, fd: int) -> bool:
        """Whether a file that somebody else has filled has every byte that `fill_file` writes."""

    def bind(self, address: int) -> Iterable[object]:
        """The component is registered: point the source at its address.

        Returns what has its bytes there from now on, for as long as it lives.
        """

    def lies(self) -> Spans:
        """Where the source's storages are now, all of them; none if any may not stay there."""

    def stay(self, address: int) -> bool:
        """Have each storage where it lies, in a component at `address`; False if that cannot be."""

    def spans(self, address: int) -> Spans:
        """Where its storages are in a component at `address`; none if others may be there too."""

    def names(self) -> Iterable[str]:
        """What `writer` takes."""

    def writer(self, values: Mapping[str, Any]) -> Callable[[int], None]:
        """What writes `values` over the component's bytes, at the address that it is given.

        Raises: InvalidSource, naming the first that does not fit.
        """


class Remote(NamedTuple):
    """Bytes of this process's own in a GPU's memory, and where in its memory they are to go."""

    target: int
    source: int
    nbytes: int


#: Copies them: all that was asked of the GPU by then is done before. Blocks.
Fetch = Callable[[Sequence[Remote]], None]


class Ready:
    """Layouts that are registered as they are, made by who knows what they are made from."""


class InMemory(ABC):
    """Layouts that are filled by address."""

    nbytes: int
    content = ""
    scratch: Scratch = ""
    filled = False

    @abstractmethod
    def fill(self, target: int) -> None:
        """Copy every byte, once, to `target` and on."""

    def fill_file(self, fd: int) -> None:
        span = vm.round_up(self.nbytes)
        target = vm.map_shared(fd, 0, span, writable=True)
        try:
            self.fill(target)
        finally:
            vm.free(target, span)

    def matches(self, fd: int) -> bool:
        return False  # nobody can know what is only here


#: Name prefixes of each segment, in the order in which they are needed.
Segments = Sequence[Sequence[str]]


def by_segment(names: Iterable[str], segments: Segments) -> list[list[str]]:
    """Group `names`: each goes where it, or what it is part of, is named first.

    What is named nowhere goes into segment 0: it may be needed from the start. Raises:
    InvalidSource if a segment would be empty.
    """
    grouped: list[list[str]] = [[] for _ in segments or [()]]
    for name in names:
        found = (i for i, s in enumerate(segments) for p in s if f"{name}.".startswith(f"{p}."))
        grouped[next(found, 0)].append(name)
    for i, group in enumerate(grouped):
        if not group and segments:
            there = ", ".join(name for group in grouped for name in group[:3]) or "nothing"
            raise InvalidSource(
                f"segment {i} names nothing there is: {list(segments[i])}; there are names like "
                f"{there}. Name these, or what they are part of"
            )
    return grouped


class Packer:
    """Places things one after the other, segment by segment."""

    def __init__(self) -> None:
        self.nbytes = 0
        #: Where each segment ended. One without bytes arrives with the one before it.
        self.ends: list[int] = []

    def end_segment(self) -> None:
        self.ends.append(self.nbytes)

    def place(self, nbytes: int) -> int:
        """The offset of the next `nbytes` bytes."""
        offset = -(-self.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        self.nbytes = offset + nbytes
        return offset


class BufferLayout(InMemory):
    """Named buffers (bytes, arrays, memoryviews); `view` reads them at their address."""

    has_views = True

    def __init__(self, buffers: Mapping[str, Buffer], segments: Segments = ()) -> None:
        packer = Packer()
        self._sources = {name: _bytes_of(name, buffer) for name, buffer in buffers.items()}
        self._places: dict[str, tuple[int, int]] = {}
        for group in by_segment(buffers, segments):
            for name in group:
                nbytes = self._sources[name].nbytes
                self._places[name] = (packer.place(nbytes), nbytes)
            packer.end_segment()
        self.nbytes = packer.nbytes
        self.segments = tuple(packer.ends)

    @property
    def memory(self) -> Collection[int]:
        return ()  # it stays with who gave it

    def origins(self) -> Iterable[tuple[str, int, int]]:
        return [(name, *extent_of_buffer(source)) for name, source in self._sources.items()]

    def digest(self) -> str:
        return blake2b(repr((self._places, self.segments)).encode(), digest_size=16).hexdigest()

    def fill(self, target: int) -> None:
        for name, (offset, nbytes) in self._places.items():
            if nbytes:
                vm.view(target + offset, nbytes)[:] = self._sources[name]

    def lies(self) -> Spans:
        return frozenset()  # it is copied, and stays as it was

    def stay(self, address: int) -> bool:
        return False

    def spans(self, address: int) -> Spans:
        return frozenset()

    def bind(self, address: int) -> Iterable[object]:
        self._sources.clear()  # whoever gave them keeps them; `view` is where the bytes are
        return ()

    def names(self) -> Iterable[str]:
        return self._places

    def writer(self, values: Mapping[str, Any]) -> Callable[[int], None]:
        sources = {name: _bytes_of(name, value) for name, value in values.items()}
        for name, source in sources.items():
            if name not in self._places:
                raise no_such(name, self._places)
            if (nbytes := self._places[name][1]) != source.nbytes:
                raise InvalidSource(
                    f"{name!r} has {source.nbytes} bytes, and {nbytes} in the component; nothing "
                    "was changed"
                )

        def write(target: int) -> None:
            for name, source in sources.items():
                if source.nbytes:
                    self.view(name, target)[:] = source

        return write

    def view(self, name: str, address: int) -> memoryview:
        """The bytes of one buffer of the component at `address`."""
        offset, nbytes = self._places[name]
        return vm.view(address + offset, nbytes)


def extent_of_buffer(value: object) -> tuple[int, int]:
    """Address and bytes of a buffer; no bytes if it is none, or has none."""
    found = _PyBuffer()
    try:
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(value), ctypes.byref(found), 0)
    except (TypeError, BufferError, ValueError):
        return 0, 0
    try:
        return found.buf or 0, found.len
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))


class _PyBuffer(ctypes.Structure):
    """Of Python's C interface: all that tells where a buffer is that is read-only."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def no_such(name: str, names: Iterable[str]) -> InvalidSource:
    """The error for a value of a name that the component has not."""
    near = get_close_matches(name, list(names), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidSource(
        f"the component has no tensor {name!r}{hint} Nothing was changed (buffers are no part of "
        "it: they are private)"
    )


def _bytes_of(name: str, buffer: Buffer) -> memoryview:
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError) as exc:
        raise InvalidSource(
            f"{name!r} is not a buffer: {exc}; give bytes, a memoryview, an array or a tensor"
        ) from exc
    if not view.c_contiguous:
        raise InvalidSource(f"{name!r} is not contiguous; copy it first")
    return view.cast("B") if view.nbytes else memoryview(b"")
