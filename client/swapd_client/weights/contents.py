"""Reads the bytes of tensors in files: into a host copy, to compare with one, or into private
memory.

The kernel moves bytes from the page cache into the host copy (`sendfile`), without a mapping of the
file and page faults. It lets one thread at a time write to a file, so other threads read into
mappings of the host copy. Cast tensors pass through a small buffer.
"""

import errno
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from operator import length_hint
from typing import Any, NamedTuple

import torch

from swapd.shared import vm
from swapd_client.errors import InvalidSource
from swapd_client.interrupts import to_its_end
from swapd_client.weights.safetensors import File, StoredTensor

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

#: Bytes that one thread fills before it takes more, and before each report.
_STEP_BYTES = 16 << 20
#: Threads that fill a host copy. More would wait for the memory or the disk.
_THREADS_MAX = 4
_CAST_ITEMS = 1 << 20


#: `told(done, total)`, in bytes.
OnProgress = Callable[[int, int], None]

#: (place, file, offset, bytes) of tensors contiguous both in a file and in the host copy.
Run = tuple[int, File, int, int]


class Progress:
    """Adds up the bytes of all layouts being filled, and reports them, in a `with` block.

    `wanted` is a callable, or True for a bar; None: a bar if tqdm is installed and stderr is a
    terminal. `total`: the bytes of all layouts.
    """

    def __init__(self, wanted: bool | OnProgress | None, total: int) -> None:
        self._told = wanted if callable(wanted) else None
        at_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._wants_bar = wanted is True or (wanted is None and at_terminal)
        self._bar: Any = None
        self._done, self._total = 0, total

    def begin(self, nbytes: int) -> None:
        # a layout is read a second time if the bytes that it shared are others
        self._total = max(self._total, self._done + nbytes)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._told is not None:
            self._told(self._done, self._total)
        if self._bar is not None:
            self._bar.update(nbytes)

    def end(self) -> None:
        """Report the rest, which other processes have read already, if any was read here."""
        if 0 < self._done < self._total:
            self.add(self._total - self._done)

    def __enter__(self) -> "Progress":
        if self._wants_bar and self._told is None:
            with suppress(ModuleNotFoundError):
                from tqdm import tqdm

                self._bar = tqdm(
                    initial=self._done,
                    total=self._total,
                    unit="B",
                    unit_scale=True,
                    desc="loading",
                    leave=False,
                )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class WantedTensor(NamedTuple):
    """A stored tensor to load, and its dtype in the component."""

    stored: StoredTensor
    dtype: torch.dtype

    @property
    def is_cast(self) -> bool:
        return DTYPES[self.stored.dtype] is not self.dtype

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes // DTYPES[self.stored.dtype].itemsize * self.dtype.itemsize


def fill(fd: int, placed: Sequence[tuple[int, WantedTensor]], progress: Progress) -> None:
    """Read each tensor to its place in a host copy; cast it if need be."""
    plain, cast = _in_order(placed)
    progress.begin(sum(wanted.stored.nbytes for _, wanted in placed))
    with progress:
        _fill_plain(fd, _steps(_runs(plain)), progress.add)
        for place, wanted in cast:
            _cast(fd, place, wanted, progress.add)
    _check_unchanged(placed)


def _fill_plain(fd: int, steps: Iterator[list[Run]], add: Callable[[int], None]) -> None:
    """Do each step once, in this thread or in helper threads, of which the system may start fewer.

    Raises the error of any thread. No helper outlives the call, even after an interrupt.
    """
    moved, left = deque[int](), deque[list[Run]]()
    threads = ThreadPoolExecutor(_THREADS_MAX, "swapd-fill")
    helpers: list[Future[None]] = []

    def help_out() -> None:
        try:
            for step in steps:
                try:
                    moved.append(_read_mapped(fd, step))
                except OSError:  # the system maps no more; the main thread needs no mapping
                    return left.append(step)
        except BaseException:
            deque(steps, 0)  # no thread takes more
            raise

    def move(step: list[Run]) -> None:
        for run in step:
            _move(fd, *run, add)
        while moved:
            add(moved.popleft())

    def end() -> None:
        deque(steps, 0)
        threads.shutdown()

    wanted = min(_THREADS_MAX, len(os.sched_getaffinity(0)), length_hint(steps))
    try:
        with suppress(RuntimeError, MemoryError):
            helpers.extend(threads.submit(help_out) for _ in range(wanted - 1))
        for step in steps:
            move(step)
    finally:
        to_its_end(end)
    for helper in helpers:
        helper.result()
    for step in left:
        move(step)
    move([])


def is_filled(fd: int, nbytes: int, placed: Sequence[tuple[int, WantedTensor]]) -> bool:
    """Whether a host copy of `nbytes` has every byte that `fill` writes."""
    plain, cast = _in_order(placed)
    span = vm.round_up(nbytes)
    master = vm.reserve(span)
    try:
        vm.map_private(fd, span, at=master)  # the file may be sealed
        same = all(_is_same(master, *run) for run in _runs(plain)) and all(
            _is_cast_same(master + place, wanted) for place, wanted in cast
        )
    finally:
        vm.free(master, span)
    _check_unchanged(placed)
    return same


def _in_order(
    placed: Sequence[tuple[int, WantedTensor]],
) -> tuple[list[tuple[int, StoredTensor]], list[tuple[int, WantedTensor]]]:
    """Return the tensors to read as they are, and those to cast, in order, without empty ones."""
    in_order = sorted(((p, w) for p, w in placed if w.nbytes), key=lambda one: one[0])
    plain = [(place, wanted.stored) for place, wanted in in_order if not wanted.is_cast]
    return plain, [(place, wanted) for place, wanted in in_order if wanted.is_cast]


def _check_unchanged(placed: Sequence[tuple[int, WantedTensor]]) -> None:
    for file in {wanted.stored.file for _, wanted in placed}:
        file.check_unchanged()


def _runs(plain: list[tuple[int, StoredTensor]]) -> list[Run]:
    runs: list[Run] = []
    for place, stored in plain:
        run = place, stored.file, stored.offset, stored.nbytes
        if runs and runs[-1][1] is stored.file:
            at, file, offset, nbytes = runs[-1]
            if (place, stored.offset) == (at + nbytes, offset + nbytes):
                run = at, file, offset, nbytes + stored.nbytes
                runs.pop()
        runs.append(run)
    return runs


def _steps(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Yield the runs by step of the host copy, cut where a step ends: threads share no page."""
    step = _STEP_BYTES
    cut = [
        (at, file, offset + at - place, min(place + nbytes, (at // step + 1) * step) - at)
        for place, file, offset, nbytes in runs
        for at in (place, *range((place // step + 1) * step, place + nbytes, step))
    ]
    return iter([list(runs) for _, runs in groupby(cut, lambda run: run[0] // step)])


def _move(
    target: int, place: int, file: File, offset: int, nbytes: int, add: Callable[[int], None]
) -> None:
    os.lseek(target, place, os.SEEK_SET)
    done = 0
    while done < nbytes:
        try:
            moved = os.sendfile(target, file.fd.fileno(), offset + done, nbytes - done)
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.ENOSYS):
                raise _unreadable(file, exc) from exc
            moved = _read_mapped(target, [(place + done, file, offset + done, nbytes - done)])
        if not moved:
            raise _cut_short(file)
        done += moved
        add(moved)


def _read_mapped(target: int, step: Sequence[Run]) -> int:
    """Read a step into a temporary mapping of the host copy; return its bytes."""
    start = step[0][0] // vm.PAGE_BYTES * vm.PAGE_BYTES
    span = vm.round_up(step[-1][0] + step[-1][3] - start)
    address = vm.map_shared(target, start, span, writable=True)
    try:
        for place, file, offset, nbytes in step:
            _read_into(vm.view(address + place - start, nbytes), file, offset)
    finally:
        vm.free(address, span)
    return sum(nbytes for *_, nbytes in step)


def _read_into(view: memoryview, file: File, offset: int) -> None:
    done = 0
    while done < view.nbytes:
        try:
            got = os.preadv(file.fd.fileno(), [view[done:]], offset + done)
        except OSError as exc:
            raise _unreadable(file, exc) from exc
        if not got:
            raise _cut_short(file)
        done += got


def _cast(target: int, place: int, wanted: WantedTensor, add: Callable[[int], None]) -> None:
    for items, read in _cast_items(wanted):
        vm.write(target, place, items.data_ptr(), items.nbytes)
        place += items.nbytes
        add(read)


def _cast_items(wanted: WantedTensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield some cast items of a tensor at a time, and the bytes read for them."""
    stored, source = wanted.stored, DTYPES[wanted.stored.dtype]
    step = _CAST_ITEMS * source.itemsize
    for at in range(0, stored.nbytes, step):
        read = min(step, stored.nbytes - at)
        yield _read_items(stored, source, at, read).to(wanted.dtype), read


def _is_same(master: int, place: int, file: File, offset: int, nbytes: int) -> bool:
    try:
        return vm.has_bytes(file.fd.fileno(), offset, master + place, nbytes)
    except EOFError:
        raise _cut_short(file) from None


def _is_cast_same(master: int, wanted: WantedTensor) -> bool:
    for items, _ in _cast_items(wanted):
        if vm.differ(master, items.data_ptr(), items.nbytes):
            return False
        master += items.nbytes
    return True


def read(stored: StoredTensor) -> torch.Tensor:
    return _read_items(stored, DTYPES[stored.dtype], 0, stored.nbytes).view(stored.shape)


def _read_items(stored: StoredTensor, dtype: torch.dtype, at: int, nbytes: int) -> torch.Tensor:
    items = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="cpu")
    if nbytes:
        _read_into(vm.view(items.data_ptr(), nbytes), stored.file, stored.offset + at)
    return items


def _unreadable(file: File, error: OSError) -> InvalidSource:
    return InvalidSource(f"{file.path} cannot be read: {error.strerror}")


def _cut_short(file: File) -> InvalidSource:
    return InvalidSource(f"{file.path} was cut short while it was read; load it again")
