"""A CUDA driver without a GPU: builds the C in this folder, and makes processes use it.

Tests use `with machine(total=...) as fake:`, a card (or several) whose memory is in a folder of its
own. Processes started with `fake.environment()` share it; to use it in this process, call
`fake.load()` before any use of `cuda.bindings`. README.md in this folder lists the emulated calls,
the knobs and the limits.
"""

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import shutil
import struct
import subprocess
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pytest

SOURCES = Path(__file__).parent
CUDA = "libcuda.so.1"
NVML = "libnvidia-ml.so.1"

#: A file in a machine's folder, locked as long as its test run lives.
OWNER = "owner"

#: The C files of each library.
LIBRARIES = {
    CUDA: (
        "accounts.c",
        "knobs.c",
        "device.c",
        "memory.c",
        "host.c",
        "stream.c",
        "capture.c",
        "copy.c",
        "loader.c",
    ),
    NVML: ("accounts.c", "nvml.c"),
}
FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread")


#: Far from the numbers that the C assigns, which start at 1 in each process.
_serials = itertools.count(1_000_000)


class Allocation(NamedTuple):
    """Device memory in use by any process. `pid` made it.

    `kind` is "memory"; or "context" or "mps" for the overhead of a process that uses the card.
    """

    pid: int
    nbytes: int
    kind: str


def build(folder: Path) -> Path:
    """Compile both libraries into `folder`, and return it.

    Raises: RuntimeError without gcc, or with the compiler's message.
    """
    gcc = shutil.which("gcc")
    if gcc is None:
        raise RuntimeError("the fake CUDA driver needs a C compiler: install gcc (apt install gcc)")
    folder.mkdir(parents=True, exist_ok=True)
    for name, sources in LIBRARIES.items():
        command = [
            gcc,
            *FLAGS,
            "-fvisibility=hidden",
            f"-Wl,-soname,{name}",
            "-o",
            str(folder / name),
        ]
        done = subprocess.run(
            [*command, *sources, "-ldl"], cwd=SOURCES, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"cannot build {name}:\n{done.stderr}")
    return folder


@functools.cache
def built() -> Path:
    """The libraries, built once a process and removed at its end."""
    folder = tempfile.TemporaryDirectory(prefix="fakecuda-")
    weakref.finalize(built, folder.cleanup)  # at exit, and without a warning about it
    return build(Path(folder.name))


def environment(folder: Path, **knobs: object) -> dict[str, str]:
    """The variables with which a process finds the libraries of `folder`, and its `knobs`.

    `total=1 << 30` becomes FAKECUDA_TOTAL=1073741824; booleans become 0 and 1. The linker reads
    LD_LIBRARY_PATH when a process starts, so these variables are for new processes, not for this
    one.
    """
    inherited = os.environ.get("LD_LIBRARY_PATH")  # noqa: TID251
    paths = [str(folder), *([inherited] if inherited else [])]
    return {"LD_LIBRARY_PATH": ":".join(paths), **variables(**knobs)}


def variables(**knobs: object) -> dict[str, str]:
    """The knobs as variables of the environment."""
    return {
        f"FAKECUDA_{name.upper()}": str(int(value) if isinstance(value, bool) else value)
        for name, value in knobs.items()
    }


def load(folder: Path, **knobs: object) -> None:
    """Make this very process use the libraries of `folder`.

    It loads them by path; a later dlopen of "libcuda.so.1" by cuda-bindings finds the name taken.
    The first CUDA call reads the knobs for the life of the process, so a process has one machine:
    tests that run the driver in pytest's own process share `loaded()`.

    Raises: RuntimeError when a libcuda is loaded already, be it this one.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(CUDA, mode=os.RTLD_NOLOAD)
        raise RuntimeError("a libcuda.so.1 is loaded in this process already")
    os.environ.update(variables(**knobs))  # noqa: TID251
    for name in LIBRARIES:
        ctypes.CDLL(str(folder / name), mode=os.RTLD_NOW | os.RTLD_GLOBAL)


class Fake:
    """One fake machine: its libraries, its device memory, its faults; seen from outside."""

    def __init__(self, libraries: Path, memory: Path, **knobs: object) -> None:
        self.libraries = libraries
        self.memory = memory
        self._knobs = {"dir": memory, "faults": memory / "faults", "total": 1 << 30, **knobs}

    def environment(self, **knobs: object) -> dict[str, str]:
        """For a process that will use this machine; `knobs` are its own."""
        return environment(self.libraries, **{**self._knobs, **knobs})

    def load(self) -> None:
        """Use this machine in this very process; see `load`."""
        load(self.libraries, **self._knobs)

    def faults(self, *rules: str) -> None:
        """From now on inject these failures, and no others; counts start anew."""
        new = self.memory / "faults.new"
        new.write_text("".join(f"{rule}\n" for rule in rules), encoding="utf-8")
        new.replace(self.memory / "faults")

    def allocations(self, gpu: int = 0) -> list[Allocation]:
        """The allocations on a card, contexts included: empty when nothing is left or leaked."""
        with self._locked(gpu) as lock:
            found = self._look(gpu)
            os.pwrite(lock, struct.pack("=Q", sum(each.nbytes for each in found)), 0)
        return found

    def held_bytes(self, gpu: int = 0) -> int:
        """Bytes of allocations, without contexts."""
        return sum(each.nbytes for each in self.allocations(gpu) if each.kind == "memory")

    def used_bytes(self, gpu: int = 0) -> int:
        return sum(each.nbytes for each in self.allocations(gpu))

    def free_bytes(self, gpu: int = 0) -> int:
        return int(str(self._knobs["total"])) - self.used_bytes(gpu)

    @contextlib.contextmanager
    def occupied(
        self, nbytes: int, *, pid: int = 0, name: str = "", mps: bool = False, gpu: int = 0
    ) -> Iterator[None]:
        """A process that holds `nbytes` of the card: `pid` (or this one), called `name`.

        For the driver the memory is in use; NVML lists the process, `mps` among MPS's clients.
        """
        pid = pid or os.getpid()
        file = f"{pid}.{next(_serials)}.{'mps' if mps else 'context'}"
        if name:
            with (self.memory / "names").open("a", encoding="utf-8") as names:
                names.write(f"{pid} {name}\n")
        with self._locked(gpu):
            fd = os.open(self._folder(gpu) / file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.truncate(fd, nbytes)
        self.allocations(gpu)  # corrects the count
        try:
            yield
        finally:
            os.close(fd)
            self.allocations(gpu)

    def _folder(self, gpu: int) -> Path:
        folder = self.memory / f"gpu{gpu}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _look(self, gpu: int) -> list[Allocation]:
        """Live allocations: some open description holds the lock of each (see accounts.c)."""
        found = []
        for path in sorted(self._folder(gpu).iterdir()):
            pid, _, kind = path.name.split(".")
            fd = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                nbytes = os.fstat(fd).st_size
                found.append(Allocation(int(pid), nbytes, kind))
            finally:
                os.close(fd)
        return found

    @contextlib.contextmanager
    def _locked(self, gpu: int) -> Iterator[int]:
        lock = os.open(self.memory / f"gpu{gpu}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)


@contextlib.contextmanager
def machine(**knobs: object) -> Iterator[Fake]:
    """A machine whose memory is removed at the end, even while processes hold it."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    _remove_leftovers(Path(parent))
    with tempfile.TemporaryDirectory(prefix="fakecuda-", dir=parent) as memory:
        new = Path(memory) / "owner.new"
        owner = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(owner, fcntl.LOCK_EX)
        new.rename(Path(memory) / OWNER)  # only now, so that no process sees it unlocked
        try:
            yield Fake(built(), Path(memory), **knobs)
        finally:
            os.close(owner)


@contextlib.contextmanager
def shown(patch: "pytest.MonkeyPatch", **knobs: object) -> Iterator[Fake]:
    """A machine for the processes that are started in the block."""
    with machine(**knobs) as fake:
        for name, value in fake.environment().items():
            patch.setenv(name, value)
        yield fake


def _remove_leftovers(parent: Path) -> None:
    """Remove the machines of killed test runs: their owner's lock is free."""
    for path in parent.glob(f"fakecuda-*/{OWNER}"):
        try:
            with path.open("rb") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:
            continue  # in use, another user's, or just removed


@functools.cache
def loaded() -> Fake:
    """The machine of this very process, until it ends: two cards of 256 MiB."""
    held = machine(total=256 << 20, devices=2)
    fake = held.__enter__()
    weakref.finalize(fake, held.__exit__, None, None, None)
    fake.load()
    return fake
