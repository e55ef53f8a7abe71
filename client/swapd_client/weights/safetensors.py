"""Safetensors files: their tensors, and the place of each. No torch, and no file is mapped.

A file is 8 bytes of length, that many bytes of JSON, then the tensors without gaps. The header is
checked: each tensor is inside the file, has the length of its shape and dtype, and overlaps no
other.
"""

import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from math import prod
from pathlib import Path, PurePath
from typing import Annotated, NamedTuple

import msgspec

from swapd.shared.documents import PROGRAMS_MAX_BYTES, read
from swapd.shared.fds import OwnedFd
from swapd_client.checks import check
from swapd_client.errors import InvalidSource

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
#: Dtypes that may be cast. Other numbers have another meaning, or scales beside them.
CAST = frozenset(("F16", "BF16", "F32", "F64"))
#: A larger length means that the bytes are no header.
HEADER_MAX_BYTES = 100 << 20

#: Bounds the product of the dimensions.
_DIMENSIONS_MAX = 64
#: Strides count in 64 bits, even for a tensor without items.
_ITEMS_MAX = 1 << 62

#: No file system's clock is slower: FAT's ticks every two seconds.
SETTLED_NS = 2_000_000_000

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"

_Size = Annotated[int, msgspec.Meta(ge=0)]


class StoredTensor(NamedTuple):
    """A tensor in a file. `offset` counts from the file's start."""

    file: "File"
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class File:
    """A file that is open for reading until `close`."""

    def __init__(self, path: Path) -> None:
        """Raises: InvalidSource if it cannot be opened."""
        self.path = path
        try:  # opening a pipe without a writer would block
            self.fd = OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except (OSError, ValueError) as exc:  # a name with a null byte is a ValueError
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise InvalidSource(f"{path} cannot be read: {why}") from exc
        status = os.fstat(self.fd.fileno())
        if not stat.S_ISREG(status.st_mode):
            self.fd.close()
            raise InvalidSource(f"{path} is no regular file")
        #: Device, inode, size, mtime and ctime, which no program can set. A write changes the
        #: identity.
        self.identity = _identity(status)
        #: Whether each later write changes its ctime: clocks of file systems may tick slowly.
        self.is_settled = time.time_ns() - status.st_ctime_ns > SETTLED_NS
        self._links = status.st_nlink

    def __repr__(self) -> str:
        return f"<File {self.path}>"

    @property
    def nbytes(self) -> int:
        return self.identity[2]

    def check_unchanged(self) -> None:
        """Raise InvalidSource if the file has changed since it was opened.

        A lost or passed-on name changes the ctime, but not the bytes.
        """
        status = os.fstat(self.fd.fileno())
        now = _identity(status)
        if status.st_nlink < self._links:
            now = (*now[:-1], self.identity[-1])
        if now != self.identity:
            raise InvalidSource(f"{self.path} changed while it was read; load it again")

    def close(self) -> None:
        self.fd.close()


def _identity(status: os.stat_result) -> tuple[int, int, int, int, int]:
    device, inode = status.st_dev, status.st_ino
    return device, inode, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode
_decode_tensor = msgspec.json.Decoder(_Tensor).decode
#: Decoders raise these for bytes that are not JSON, not UTF-8, or nested too deep.
_NOT_JSON = (msgspec.MsgspecError, ValueError, RecursionError)


@contextmanager
def open_all(files: Files) -> Iterator[dict[str, StoredTensor]]:
    """Yield the tensors of all files, by name; close the files in the end. Raises: InvalidSource.

    `files`: a file, several, a folder with some or with their index, or an index
    (`model.safetensors.index.json`), of which only the listed tensors count.
    """
    with ExitStack() as opened:
        tensors: dict[str, StoredTensor] = {}
        for path, listed in _paths(files):
            file = opened.enter_context(closing(File(path)))
            _add(tensors, file, listed)
        yield tensors


def header(file: File) -> list[StoredTensor]:
    """Return a file's tensors, in the order of their bytes. Raises: InvalidSource."""
    path, fd = file.path, file.fd.fileno()
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    begin = 8 + length
    if file.nbytes < 8 or begin > file.nbytes or length > HEADER_MAX_BYTES:
        raise _bad(path, f"it has {file.nbytes} bytes, and its header would end at {begin}")
    try:
        entries = _decode_header(os.pread(fd, length, 8))
        if metadata := entries.pop("__metadata__", None):
            _decode_metadata(metadata)
        found = {name: _decode_tensor(raw) for name, raw in entries.items()}
    except _NOT_JSON as exc:
        raise _bad(path, str(exc)) from exc
    return _checked(file, begin, found)


def _checked(file: File, begin: int, found: Mapping[str, _Tensor]) -> list[StoredTensor]:
    stored = []
    end = 0
    for name, tensor in sorted(found.items(), key=lambda item: item[1].data_offsets):
        if tensor.dtype not in ITEM_BYTES:
            raise InvalidSource(
                f"{file.path} cannot be loaded: {name!r} is of dtype {tensor.dtype!r}; known are "
                f"{', '.join(ITEM_BYTES)}"
            )
        if len(tensor.shape) > _DIMENSIONS_MAX:
            raise _bad(file.path, f"{name!r} has {len(tensor.shape)} dimensions")
        start, stop = tensor.data_offsets
        nbytes = prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if stop - start != nbytes:
            raise _bad(
                file.path,
                f"{name!r} of shape {tensor.shape} and dtype {tensor.dtype} has {nbytes} bytes, "
                f"and its place is {start} to {stop}",
            )
        if prod(max(n, 1) for n in tensor.shape) > _ITEMS_MAX:
            raise _bad(file.path, f"{name!r} has the shape {tensor.shape}")
        if start != end:
            what = "overlaps another tensor" if start < end else "comes after a gap"
            raise _bad(file.path, f"{name!r} {what}, at {start}")
        end = stop
        stored.append(
            StoredTensor(file, name, tensor.dtype, tuple(tensor.shape), begin + start, nbytes)
        )
    if begin + end != file.nbytes:
        raise _bad(file.path, f"its tensors end at {begin + end}, the file at {file.nbytes}")
    return stored


def _bad(path: Path, why: str) -> InvalidSource:
    return InvalidSource(
        f"{path} is no safetensors file, or was cut short: {why}. Fetch or save it again"
    )


def _add(tensors: dict[str, StoredTensor], file: File, listed: Collection[str] | None) -> None:
    for stored in header(file):
        if listed is not None and stored.name not in listed:
            continue
        if stored.name in tensors:
            raise InvalidSource(
                f"{stored.name!r} is in {tensors[stored.name].file.path} and in "
                f"{stored.file.path}; load files of one checkpoint"
            )
        tensors[stored.name] = stored
    for name in listed or ():
        if name not in tensors or tensors[name].file is not file:
            raise InvalidSource(f"{file.path} has no tensor {name!r}, which the index says")


def _paths(files: Files) -> list[tuple[Path, set[str] | None]]:
    """Return each file, and the tensors wanted from it (None: all)."""
    if not isinstance(files, str | os.PathLike):
        check("files", files, Iterable, "a path, or several")
        return [found for one in files for found in _paths(one)]
    path = Path(files)
    if path.is_dir():
        return _in_folder(path)
    if path.name.endswith(".json"):
        return _in_index(path)
    return [(path, None)]


def _in_folder(folder: Path) -> list[tuple[Path, set[str] | None]]:
    indices = sorted(folder.glob(f"*{_INDEX_SUFFIX}"))
    if len(indices) == 1:
        return _in_index(indices[0])
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    if indices or not files:
        there = listed([p.name for p in indices or sorted(folder.iterdir())], 5) or "nothing"
        what = "several indices; name one" if indices else f"no {_SUFFIX} file"
        raise InvalidSource(f"{folder} has {what}: there is {there}")
    return [(file, None) for file in files]


def _in_index(path: Path) -> list[tuple[Path, set[str] | None]]:
    try:
        index = msgspec.json.decode(read(path, PROGRAMS_MAX_BYTES), type=_Index)
    except OSError as exc:
        raise InvalidSource(f"{path} cannot be read: {exc.strerror}") from exc
    except _NOT_JSON as exc:
        raise InvalidSource(f"{path} is no index of safetensors files: {exc}") from exc
    listed: dict[str, set[str]] = {}
    for name, file in index.weight_map.items():
        if PurePath(file).name != file or file in ("", ".."):
            raise InvalidSource(f"{path} names {file!r}, which is no file beside it")
        listed.setdefault(file, set()).add(name)
    return [(path.parent / file, names) for file, names in sorted(listed.items())]


def listed(names: Collection[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + more
