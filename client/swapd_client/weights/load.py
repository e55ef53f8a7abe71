"""Components straight from safetensors files, read into the host copy without a second copy.

This module decides which tensors go where; `contents.py` moves the bytes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b

import torch

from swapd.shared import protocol
from swapd.shared.text import counted
from swapd_client.checks import check, names_in
from swapd_client.errors import InvalidSource
from swapd_client.memory import dlpack, ranges
from swapd_client.memory.layout import Packer, Ready, Segments, Spans, by_segment, whose_prefix
from swapd_client.memory.movable import extent
from swapd_client.memory.tensors import PlacedTensors, TensorPlacement
from swapd_client.weights import contents
from swapd_client.weights.contents import DTYPES, Progress, WantedTensor
from swapd_client.weights.load_target import LoadTarget, Slots
from swapd_client.weights.safetensors import CAST, Files, StoredTensor, open_all

#: The new name of a file's tensor; None leaves the tensor out.
Rename = Callable[[str], str | None]

#: Count up when `fill_file` changes the bytes.
READER = 1


class FileLayout(PlacedTensors, Ready):
    """Tensors of files, and the parameters of a module that they replace.

    The files must stay open until the layout is filled. `bind` fills `tensors`.
    """

    def __init__(
        self,
        wanted: Mapping[str, WantedTensor],
        slots: Mapping[str, Slots],
        segments: Segments,
        target: dlpack.Target,
        progress: Progress,
        *,
        share: bool,
    ) -> None:
        """`slots`: the module's parameters, by tensor. `share`: with sessions that load these
        files.
        """
        self._wanted = wanted
        self._slots = {name: slots[name] for name in wanted if name in slots}
        self._target = target
        self._progress = progress
        packer, places = _packed(wanted, segments)
        self.nbytes = packer.nbytes
        self.segments = tuple(packer.ends)
        self.placed = tuple(
            TensorPlacement(name, w.dtype, w.stored.shape, _strides(w.stored.shape), places[name])
            for name, w in wanted.items()
        )
        self.aliases = {a: n for n, s in self._slots.items() for a in s.places if a != n}
        self.tensors: dict[str, torch.Tensor] = {}
        self.content = self._content() if share else ""
        self.certain = all(w.stored.file.is_settled for w in wanted.values())

    @property
    def memory(self) -> Collection[int]:
        return [start for _, start, nbytes in self.origins() if nbytes]

    def origins(self) -> Iterable[tuple[str, int, int]]:
        """Return the parameters to replace; their bytes are not read."""
        return [(name, *extent(slots.parameter)) for name, slots in self._slots.items()]

    def fill_file(self, fd: int) -> None:
        contents.fill(fd, self._with_places(), self._progress)

    def matches(self, fd: int) -> bool:
        return contents.is_filled(fd, self.nbytes, self._with_places())

    def _with_places(self) -> list[tuple[int, WantedTensor]]:
        return [(one.place, self._wanted[one.name]) for one in self.placed]

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
        for one in self.placed if self._wanted else ():  # else it is bound already
            slots = self._slots.get(one.name)
            # in the parameter's own mode: one that is partly an inference tensor works in no mode
            with torch.inference_mode(slots is not None and slots.is_inference), torch.no_grad():
                tensor = self._tensor(one, address)
                self.tensors[one.name] = tensor if slots is None else slots.put(tensor)
            storages.append(tensor.untyped_storage())
        return storages

    def let_go(self) -> None:
        self._wanted = {}
        self._slots = {}

    def _tensor(self, one: TensorPlacement, address: int) -> torch.Tensor:
        nbytes = self._wanted[one.name].nbytes
        if not nbytes:
            return torch.empty(one.shape, dtype=one.dtype, device=self._target.device)
        base = dlpack.bytes_at(address + one.place, nbytes, self._target)
        return base.view(one.dtype).view(one.shape)

    def _content(self) -> str:
        """Identify the bytes while nobody writes to the files. The cast depends on torch's
        version.
        """
        read: list[tuple[object, ...]] = [(READER, torch.__version__)]
        read += [
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
    """Yield the layouts that load `files`, by part ("" without `parts`), for use in the block only.

    Raises: InvalidSource if a file is no safetensors file, or a tensor that `module` needs is
    missing; InvalidArgument if `dtype` is none. Then nothing has changed.
    """
    check("dtype", dtype, torch.dtype | None, "a dtype of torch, as in torch.bfloat16")
    check("module", module, torch.nn.Module | None, "a module of torch")
    check("parts", parts, Mapping | None, "a dict of parts and the names of their tensors")
    check("prefix", prefix, str, "a text")
    check("rename", rename, Callable | None, "a callable")
    with open_all(files) as stored:
        target = dlpack.HOST if gpu is None else dlpack.gpu(gpu)
        tensors = _renamed(stored, prefix, rename)
        if not tensors:
            raise InvalidSource(_nothing(stored, prefix, rename is not None))
        into = LoadTarget(module, target.device) if module is not None else None
        slots = _matched(into, tensors) if into is not None else {}
        names = list(tensors if into is None else slots)
        shown = Progress(progress, sum(tensors[name].nbytes for name in names))
        layouts = {}
        for part, named in _by_part(names, parts).items():
            wanted = {n: WantedTensor(tensors[n], _dtype(tensors[n], dtype)) for n in named}
            layouts[part] = FileLayout(wanted, slots, segments, target, shown, share=share)
        yield layouts
        shown.end()
        if into is not None:
            into.finish()


def _matched(into: LoadTarget, tensors: Mapping[str, StoredTensor]) -> dict[str, Slots]:
    """Return the parameters to replace. Buffers are read now."""
    slots = into.match({n: s.shape for n, s in tensors.items()})
    loaded = {n: buffer for n, buffer in into.buffers.items() if n in tensors}
    ranges.refuse_taken((n, *extent(buffer)) for n, buffer in loaded.items())
    into.load_buffers({n: contents.read(tensors[n]) for n in loaded})
    into.say_unexpected(tensors.keys() - slots.keys())
    return slots


def _renamed(
    stored: Mapping[str, StoredTensor], prefix: str, rename: Rename | None
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
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


def _nothing(stored: Mapping[str, StoredTensor], prefix: str, renamed: bool) -> str:
    if not stored:
        return "nothing to load: the files are empty"
    why = f", and none begins with {prefix!r}" if prefix else ""
    why += ", and rename leaves out the others" if prefix and renamed else ""
    why = why or ", and rename leaves out all of them"
    some = ", ".join(list(stored)[:3])
    return f"nothing to load: the files have {counted(len(stored), 'tensor')} ({some}, ...){why}"


def _dtype(stored: StoredTensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.dtype in CAST else DTYPES[stored.dtype]


def _by_part(names: list[str], parts: Mapping[str, Iterable[str]] | None) -> dict[str, list[str]]:
    """Group names by the parts' prefixes; "rest" gets the others."""
    if parts is None:
        return {"": names}
    found: dict[str, list[str]] = {part: [] for part in parts}
    whose = [(p, part) for part, its in parts.items() for p in names_in("parts", its, parts)]
    for name in names:
        part = whose_prefix(name, whose, protocol.REST)
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


def _packed(
    wanted: Mapping[str, WantedTensor], segments: Segments
) -> tuple[Packer, dict[str, int]]:
    """Place the tensors: by segment, in the order of the files."""
    packer = Packer()
    places: dict[str, int] = {}
    for group in by_segment(wanted, segments):
        for name in sorted(group, key=lambda n: _order(wanted[n])):
            places[name] = packer.place(wanted[name].nbytes) if wanted[name].nbytes else 0
        packer.end_segment()
    return packer, places


def _order(wanted: WantedTensor) -> tuple[str, int]:
    return str(wanted.stored.file.path), wanted.stored.offset


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
