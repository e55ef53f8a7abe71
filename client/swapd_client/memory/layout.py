"""The order of storages in a component, each aligned. No torch.

A layout is made from a source (buffers here, tensors in `tensors.py`). It says how many bytes the
host copy needs, fills it once, and then points the source at the component's address.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

from swapd.shared import vm
from swapd.shared.protocol import Scratch
from swapd_client.checks import check, names_in
from swapd_client.errors import InvalidSource

#: Address and bytes of each storage.
Spans = frozenset[tuple[int, int]]

Owner = TypeVar("Owner")
T = TypeVar("T")

#: Also numpy arrays: any argument of memoryview.
Buffer = bytes | bytearray | memoryview

#: Number of samples that identify contents, and the bytes of each.
SAMPLES, SAMPLE_BYTES = 64, 64

#: Alignment of each storage: enough for any vector load.
ALIGN_BYTES = 256


class ContentMismatch(Exception):
    """A shared host copy has other bytes than its source: register again, without sharing."""

    def __init__(self, name: str, *, was_guessed: bool) -> None:
        """`was_guessed`: sharing was based on samples, which other contents may have, too."""
        super().__init__(f"{name!r} has other bytes than its source")
        self.name = name
        self.was_guessed = was_guessed


class Layout(ABC):
    """A source of bytes, and the place of each. By default no memory of a source moves."""

    nbytes: int
    #: The end of each segment in bytes, ascending; the last is `nbytes`.
    segments: tuple[int, ...]
    #: Identifies the bytes before they are read: sessions with equal ones share a host copy, if it
    #: `matches` all bytes. "": not shared.
    content = ""
    #: Whether other bytes never have this content.
    certain = False
    #: The kind of scratch, which decides on its contents at eviction; whether there are contents to
    #: fill in.
    scratch: Scratch = ""
    filled = False
    #: Whether new objects may get its bytes at any later time.
    has_views = False

    @property
    def memory(self) -> Collection[int]:
        """Addresses that reveal two sources which would move the same memory."""
        return ()

    def origins(self) -> Iterable[tuple[str, int, int]]:
        """Name, address and bytes of the source's present memory, to be read or replaced."""
        return ()

    def digest(self) -> str:
        """Hash of names, kinds and places: equal layouts can share a host copy."""
        return ""

    @abstractmethod
    def fill_file(self, fd: int) -> None:
        """Copy every byte into a file of `nbytes`. It is not mapped afterwards."""

    def matches(self, fd: int) -> bool:
        """Whether a file that another session filled has the bytes that `fill_file` writes."""
        return False

    def bind(self, address: int) -> Iterable[object]:
        """Point the source at the component's address. May be repeated after an interrupt.

        Returns the objects that have bytes there, for as long as they live.
        """
        return ()

    def let_go(self) -> None:  # noqa: B027 - scratch has no source
        """Keep no reference to the source, which is bound."""

    def lies(self) -> Spans:
        """Return where the storages are now; nothing if one cannot stay there."""
        return frozenset()

    def stay(self, address: int) -> bool:
        """Keep each storage at its place, in a component at `address`; False if impossible."""
        return False

    def spans(self, address: int) -> Spans:
        """Return where the storages lie in a component at `address`; nothing if others may be
        there.
        """
        return frozenset()

    def names(self) -> Iterable[str]:
        """The names that `writer` takes."""
        return ()

    @abstractmethod
    def writer(self, values: Mapping[str, Any]) -> Callable[[int], None]:
        """Return a function that writes `values` over the component's bytes at a given address.

        Raises: InvalidSource, naming the first value that does not fit.
        """


class RemoteBytes(NamedTuple):
    """Private bytes in GPU memory, and their target address in host memory."""

    target: int
    source: int
    nbytes: int


def through_mapping(fd: int, nbytes: int, do: Callable[[int], T], *, writable: bool = False) -> T:
    """Return `do(address)`, with a host copy mapped there."""
    span = vm.round_up(nbytes)
    address = vm.map_shared(fd, 0, span, writable=writable)
    try:
        return do(address)
    finally:
        vm.free(address, span)


#: Copies the bytes after all work queued on the GPU so far. Blocks.
Fetch = Callable[[Sequence[RemoteBytes]], None]


class Ready(Layout):
    """A prepared layout, which `register` takes as it is."""


class InMemory(Layout):
    """Layouts whose bytes are in this process's memory."""

    @abstractmethod
    def sources(self) -> Iterable[tuple[int, int, int]]:
        """Place in the component, address and bytes of each piece that the CPU can read."""

    def fill_file(self, fd: int) -> None:
        for place, address, nbytes in self.sources():
            vm.write(fd, place, address, nbytes)

    def matches(self, fd: int) -> bool:
        return all(vm.has_bytes(fd, *source) for source in self.sources())

    def guess(self) -> None:
        """Set `content` by samples of the bytes: replicas have the same, and compare all bytes."""
        every = max(self.nbytes // SAMPLES, SAMPLE_BYTES)
        samples, at = blake2b(digest_size=20), 0
        for _, address, nbytes in self.sources():
            while at < nbytes:
                samples.update(ctypes.string_at(address + at, min(SAMPLE_BYTES, nbytes - at)))
                at += every
            at -= nbytes
        self.content = f"bytes:{samples.hexdigest()}"


#: Name prefixes of each segment, in the order of need.
Segments = Sequence[Sequence[str]]


def by_segment(names: Iterable[str], segments: Segments) -> list[list[str]]:
    """Group `names`: each goes to the first segment that has it, or a prefix of it.

    Other names go into segment 0: they may be needed from the start. Raises: InvalidSource if a
    segment would be empty.
    """
    check("segments", segments, Iterable, "lists of names")
    segments = [names_in("segments", one, segments) for one in segments]
    grouped: list[list[str]] = [[] for _ in segments or [()]]
    whose = [(prefix, i) for i, segment in enumerate(segments) for prefix in segment]
    for name in names:
        grouped[whose_prefix(name, whose, 0)].append(name)
    _refuse_empty(segments, grouped)
    return grouped


def _refuse_empty(segments: Segments, grouped: Sequence[Sequence[str]]) -> None:
    for i, segment in enumerate(segments):
        if not grouped[i]:
            there = ", ".join(islice(chain(*grouped), 9)) or "nothing"
            raise InvalidSource(
                f"segment {i} names nothing there is: {list(segment)}; there are names like "
                f"{there}. Give these, or prefixes of them"
            )


def whose_prefix(name: str, whose: Iterable[tuple[str, Owner]], other: Owner) -> Owner:
    """Return the owner of the first prefix of `name` that ends at a dot, or is `name`."""
    found = (owner for prefix, owner in whose if f"{name}.".startswith(f"{prefix}."))
    return next(found, other)


class Packer:
    def __init__(self) -> None:
        self.nbytes = 0
        #: The ends of segments. A segment without bytes arrives with the one before.
        self.ends: list[int] = []

    def end_segment(self) -> None:
        self.ends.append(self.nbytes)

    def place(self, nbytes: int) -> int:
        offset = -(-self.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        self.nbytes = offset + nbytes
        return offset


class BufferLayout(InMemory):
    """Named buffers (bytes, arrays, memoryviews); `view` reads them at their address.

    The caller keeps the buffers, which are copied.
    """

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

    def origins(self) -> Iterable[tuple[str, int, int]]:
        return [(name, *extent_of_buffer(source)) for name, source in self._sources.items()]

    def digest(self) -> str:
        return blake2b(repr((self._places, self.segments)).encode(), digest_size=16).hexdigest()

    def sources(self) -> Iterable[tuple[int, int, int]]:
        return [
            (self._places[name][0], *extent_of_buffer(source))
            for name, source in self._sources.items()
        ]

    def let_go(self) -> None:
        self._sources.clear()  # the caller keeps its buffers; `view` has the component's

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
        offset, nbytes = self._places[name]
        return vm.view(address + offset, nbytes)


def extent_of_buffer(value: object) -> tuple[int, int]:
    """Return address and bytes of a buffer; no bytes if it is empty or no buffer."""
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
    """Python's Py_buffer, which gives the address of a read-only buffer, too."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("others", ctypes.c_void_p * 7),  # `itemsize` to `internal`, unused
    )


def no_such(name: str, names: Iterable[str]) -> InvalidSource:
    near = get_close_matches(str(name), list(names), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
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
