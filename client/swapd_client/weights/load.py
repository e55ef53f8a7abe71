"""Components straight from safetensors files: read into the host copy, without a second copy.

The kernel moves the bytes from the page cache into the host copy (`sendfile`), with no mapping of
the file and no page faults. Cast tensors pass through a small buffer instead.
"""

import ctypes
import errno
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

import torch

from swapd.shared import protocol, vm
from swapd_client.errors import InvalidSource
from swapd_client.memory import dlpack, ranges
from swapd_client.memory.layout import Packer, Ready, Segments, Spans, by_segment
from swapd_client.memory.tensors import Placed, PlacedTensors, extent
from swapd_client.weights.into import Into, Slots
from swapd_client.weights.progress import Progress
from swapd_client.weights.safetensors import File, Files, Stored, open_all

log = logging.getLogger("swapd_client")

#: The new name of a tensor in a file; None leaves the tensor out.
Rename = Callable[[str], str | None]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
#: Dtypes that `dtype` casts. Numbers of other kinds have another meaning, or scales beside them.
_CAST = {"F16", "BF16", "F32", "F64"}

#: Bytes moved before each report of progress.
_STEP_BYTES = 64 << 20
#: Bytes compared at a time: they should fit a core's cache.
_COMPARE_BYTES = 256 << 10
#: Items cast at a time.
_CAST_ITEMS = 1 << 20


class Wanted(NamedTuple):
    """A tensor to load: its place in a file, and its dtype in the component."""

    stored: Stored
    dtype: torch.dtype

    @property
    def is_cast(self) -> bool:
        return DTYPES[self.stored.dtype] is not self.dtype

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes if not self.is_cast else self._items * self.dtype.itemsize

    @property
    def _items(self) -> int:
        return self.stored.nbytes // DTYPES[self.stored.dtype].itemsize


class FileLayout(PlacedTensors, Ready):
    """Tensors of files, and the parameters of a module that they replace.

    The files must stay open until the layout is filled. After `bind`, `tensors` has them by name.
    """

    def __init__(
        self,
        wanted: Mapping[str, Wanted],
        slots: Mapping[str, Slots],
        segments: Segments,
        target: dlpack.Target,
        progress: Progress,
        *,
        share: bool,
    ) -> None:
        """`slots`: the parameters of a module, by tensor; tensors without one are in `tensors`
        only. `share`: share the host copy with sessions that load the same files.
        """
        self._wanted = wanted
        self._slots = slots
        self._target = target
        self._progress = progress
        packer = Packer()
        places: dict[str, int] = {}
        for group in by_segment(wanted, segments):
            for name in sorted(group, key=lambda n: _order(wanted[n])):
                places[name] = packer.place(wanted[name].nbytes) if wanted[name].nbytes else 0
            packer.end_segment()
        self.nbytes = packer.nbytes
        self.segments = tuple(packer.ends)
        self.placed = tuple(
            Placed(name, w.dtype, w.stored.shape, _strides(w.stored.shape), places[name])
            for name, w in wanted.items()
        )
        self.aliases = {alias: n for n, s in slots.items() for alias in s.names if alias != n}
        self.tensors: dict[str, torch.Tensor] = {}
        described = [(p.name, str(p.dtype), *p[2:]) for p in self.placed]
        self._digest = blake2b(
            repr((described, self.segments)).encode(), digest_size=16
        ).hexdigest()
        self.content = self._content() if share else ""
        self.scratch: protocol.Scratch = ""
        self.filled = False

    @property
    def memory(self) -> Collection[int]:
        return [start for _, start, nbytes in self.origins() if nbytes]

    def origins(self) -> Iterable[tuple[str, int, int]]:
        """The parameters that the tensors replace; their bytes are not read."""
        return [(name, *extent(slots.parameter)) for name, slots in self._slots.items()]

    def digest(self) -> str:
        return self._digest

    def fill_file(self, fd: int) -> None:
        places = {one.name: one.place for one in self.placed}
        in_order = sorted((places[n], n, w) for n, w in self._wanted.items() if w.nbytes)
        plain = [(place, w.stored) for place, _, w in in_order if not w.is_cast]
        self._progress.begin(sum(w.stored.nbytes for _, _, w in in_order))
        with self._progress:
            for run in _runs(plain):
                _move(fd, *run, self._progress.add)
            for place, _, w in in_order:
                if w.is_cast:
                    _cast(fd, place, w, self._progress.add)
        for file in {w.stored.file for w in self._wanted.values()}:
            file.check_unchanged()

    def matches(self, fd: int) -> bool:
        places = {one.name: one.place for one in self.placed}
        in_order = sorted((places[n], n, w) for n, w in self._wanted.items() if w.nbytes)
        plain = [(place, w.stored) for place, _, w in in_order if not w.is_cast]
        with _mapped(fd, self.nbytes) as master:
            same = all(_is_same(master, *run) for run in _runs(plain)) and all(
                _is_cast_same(master + place, w) for place, _, w in in_order if w.is_cast
            )
        for file in {w.stored.file for w in self._wanted.values()}:
            file.check_unchanged()
        return same

    def lies(self) -> Spans:
        there = {name: slots.parameter for name, slots in self._slots.items()}
        if there.keys() != self._wanted.keys():
            return frozenset()
        if any(t.is_meta or t.device != self._target.device for t in there.values()):
            return frozenset()
        return frozenset(
            (t.data_ptr(), self._wanted[n].nbytes) for n, t in there.items() if t.numel()
        )

    def stay(self, address: int) -> bool:
        return all(
            self._slots[one.name].parameter.data_ptr() == address + one.place
            for one in self.placed
            if self._wanted[one.name].nbytes
        )

    def spans(self, address: int) -> Spans:
        nbytes = {one.name: self.tensors[one.name].nbytes for one in self.placed}
        return frozenset((address + p.place, nbytes[p.name]) for p in self.placed if nbytes[p.name])

    def bind(self, address: int) -> Iterable[object]:
        storages = []
        with torch.inference_mode(False), torch.no_grad():
            for one in self.placed:
                tensor = self._tensor(one, address)
                storages.append(tensor.untyped_storage())
                slots = self._slots.get(one.name)
                self.tensors[one.name] = tensor if slots is None else slots.put(tensor)
        self._wanted = {}
        self._slots = {}
        return storages

    def _tensor(self, one: Placed, address: int) -> torch.Tensor:
        nbytes = self._wanted[one.name].nbytes
        if not nbytes:
            return torch.empty(one.shape, dtype=one.dtype, device=self._target.device)
        base = dlpack.bytes_at(address + one.place, nbytes, self._target)
        return base.view(one.dtype).view(one.shape)

    def _content(self) -> str:
        """Identifies the bytes: valid as long as no process writes to the files."""
        read = [
            (name, *w.stored.file.identity, w.stored.offset, str(w.dtype))
            for name, w in self._wanted.items()
        ]
        return "files:" + blake2b(repr(read).encode(), digest_size=20).hexdigest()


@contextmanager
def planned(
    files: Files,
    module: torch.nn.Module | None,
    parts: Mapping[str, Iterable[str]] | None,
    *,
    prefix: str,
    rename: Rename | None,
    dtype: torch.dtype | None,
    segments: Segments,
    gpu: int | None,
    progress: "bool | Callable[[int, int], None] | None",
    share: bool,
) -> Iterator[dict[str, FileLayout]]:
    """The layouts that load `files`, by part; "" without `parts`. Use them in the block only.

    Raises: InvalidSource, if a file is no safetensors file, or a tensor that `module` needs is
    missing; then nothing has changed.
    """
    opened, stored = open_all(files)
    try:
        target = dlpack.HOST if gpu is None else dlpack.gpu(gpu)
        tensors = _renamed(stored, prefix, rename)
        if not tensors:
            raise InvalidSource(_nothing(stored, prefix, rename is not None))
        into = Into(module, target.device) if module is not None else None
        slots = into.match({n: s.shape for n, s in tensors.items()}) if into else {}
        names = list(slots) if into else list(tensors)
        wanted = {n: Wanted(tensors[n], _dtype(tensors[n], dtype)) for n in names}
        if into is not None:
            loaded = {n: buffer for n, buffer in into.buffers.items() if n in tensors}
            ranges.refuse_taken((n, *extent(buffer)) for n, buffer in loaded.items())
            into.load_buffers({n: _read(tensors[n]) for n in loaded})
            into.say_unexpected(tensors.keys() - wanted.keys())
        shown = Progress(progress)
        layouts = {}
        for part, named in _by_part(names, parts).items():
            layouts[part] = FileLayout(
                {n: wanted[n] for n in named},
                {n: slots[n] for n in named if n in slots},
                segments,
                target,
                shown,
                share=share,
            )
        yield layouts
        if into is not None:
            into.finish()
    finally:
        for file in opened:
            file.close()


def _renamed(stored: Mapping[str, Stored], prefix: str, rename: Rename | None) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for name, one in stored.items():
        if not name.startswith(prefix):
            continue
        short = name.removeprefix(prefix)
        new = short if rename is None else rename(short)
        if new is None:
            continue
        if new in tensors:
            raise InvalidSource(f"{tensors[new].name!r} and {name!r} would both be called {new!r}")
        tensors[new] = one
    return tensors


def _nothing(stored: Mapping[str, Stored], prefix: str, renamed: bool) -> str:
    if not stored:
        return "nothing to load: the files are empty"
    why = f", and none begins with {prefix!r}" if prefix else ""
    why += ", and rename leaves out the others" if prefix and renamed else ""
    why = why or ", and rename leaves out all of them"
    some = ", ".join(list(stored)[:3])
    return f"nothing to load: the files have {len(stored)} tensors ({some}, ...){why}"


def _dtype(stored: Stored, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.dtype in _CAST else DTYPES[stored.dtype]


def _by_part(names: list[str], parts: Mapping[str, Iterable[str]] | None) -> dict[str, list[str]]:
    """The names of each part, by prefix; "rest" has the others."""
    if parts is None:
        return {"": names}
    found: dict[str, list[str]] = {part: [] for part in parts}
    whose = [(f"{p}.", part) for part, prefixes in parts.items() for p in prefixes]
    for name in names:
        part = next((part for p, part in whose if f"{name}.".startswith(p)), protocol.REST)
        if part not in found:
            raise InvalidSource(f"{name!r} is in none of the parts; add one called 'rest'")
        found[part].append(name)
    if empty := [part for part, named in found.items() if not named]:
        some = ", ".join(names[:3])
        raise InvalidSource(
            f"there is no tensor for {', '.join(empty)}: leave out parts that are empty, or name "
            f"what the files have ({some}, ...)"
        )
    return found


def _order(wanted: Wanted) -> tuple[str, int]:
    return str(wanted.stored.file.path), wanted.stored.offset


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


# --- bytes -------------------------------------------------------------------------------


def _runs(plain: list[tuple[int, Stored]]) -> Iterator[tuple[int, File, int, int]]:
    """(place, file, offset, bytes) of tensors contiguous both in a file and in the host copy."""
    run: tuple[int, File, int, int] | None = None
    for place, stored in plain:
        if run and run[1] is stored.file:
            at, file, offset, nbytes = run
            if place == at + nbytes and stored.offset == offset + nbytes:
                run = at, file, offset, nbytes + stored.nbytes
                continue
        if run:
            yield run
        run = place, stored.file, stored.offset, stored.nbytes
    if run:
        yield run


def _move(
    target: int, place: int, file: File, offset: int, nbytes: int, add: Callable[[int], None]
) -> None:
    """Have the kernel copy a part of a file into the host copy."""
    os.lseek(target, place, os.SEEK_SET)
    done = 0
    while done < nbytes:
        step = min(nbytes - done, _STEP_BYTES)
        try:
            moved = os.sendfile(target, file.fd.fileno(), offset + done, step)
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.ENOSYS):
                raise InvalidSource(f"{file.path} cannot be read: {exc.strerror}") from exc
            moved = _copy(target, place + done, file, offset + done, step)
            os.lseek(target, place + done + moved, os.SEEK_SET)
        if not moved:
            raise InvalidSource(f"{file.path} was cut short while it was read; load it again")
        done += moved
        add(moved)


def _copy(target: int, place: int, file: File, offset: int, nbytes: int) -> int:
    """As `_move`, up to 1 MiB, for file systems without `sendfile`."""
    return os.pwrite(target, os.pread(file.fd.fileno(), min(nbytes, 1 << 20), offset), place)


def _cast(target: int, place: int, wanted: Wanted, add: Callable[[int], None]) -> None:
    """Read a tensor, cast it, and write it, in small steps."""
    stored, source = wanted.stored, DTYPES[wanted.stored.dtype]
    step = _CAST_ITEMS * source.itemsize
    for at in range(0, stored.nbytes, step):
        items = _read_items(stored, source, at, min(step, stored.nbytes - at)).to(wanted.dtype)
        view = memoryview(_bytes_of(items))
        done = 0
        while done < len(view):
            done += os.pwrite(target, view[done:], place + done)
        place += len(view)
        add(min(step, stored.nbytes - at))


@contextmanager
def _mapped(fd: int, nbytes: int) -> Iterator[int]:
    """The address of a host copy, mapped private since the file may be sealed; only read."""
    span = vm.round_up(nbytes)
    address = vm.reserve(span)
    try:
        vm.map_private(fd, span, at=address)
        yield address
    finally:
        vm.free(address, span)


def _is_same(master: int, place: int, file: File, offset: int, nbytes: int) -> bool:
    """Whether a part of a file equals the host copy at `place`."""
    buffer = (ctypes.c_ubyte * min(nbytes, _COMPARE_BYTES))()
    done = 0
    while done < nbytes:
        view = memoryview(buffer)[: min(nbytes - done, _COMPARE_BYTES)]
        got = os.preadv(file.fd.fileno(), [view], offset + done)
        if not got:
            raise InvalidSource(f"{file.path} was cut short while it was read; load it again")
        if vm.differ(master + place + done, ctypes.addressof(buffer), got):
            return False
        done += got
    return True


def _is_cast_same(master: int, wanted: Wanted) -> bool:
    """Whether a tensor, after its cast, equals the host copy at this address."""
    stored, source = wanted.stored, DTYPES[wanted.stored.dtype]
    step = _CAST_ITEMS * source.itemsize
    for at in range(0, stored.nbytes, step):
        items = _read_items(stored, source, at, min(step, stored.nbytes - at)).to(wanted.dtype)
        if vm.differ(master, items.data_ptr(), items.nbytes):
            return False
        master += items.nbytes
    return True


def _read(stored: Stored) -> torch.Tensor:
    """A tensor of a file in private memory."""
    return _read_items(stored, DTYPES[stored.dtype], 0, stored.nbytes).view(stored.shape)


def _read_items(stored: Stored, dtype: torch.dtype, at: int, nbytes: int) -> torch.Tensor:
    items = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
    view = memoryview(_bytes_of(items))
    done = 0
    while done < nbytes:
        got = os.preadv(stored.file.fd.fileno(), [view[done:]], stored.offset + at + done)
        if not got:
            raise InvalidSource(
                f"{stored.file.path} was cut short while it was read; load it again"
            )
        done += got
    return items


def _bytes_of(tensor: torch.Tensor) -> "ctypes.Array[ctypes.c_ubyte]":
    """The tensor's memory; the tensor must outlive it."""
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr() or 1)
