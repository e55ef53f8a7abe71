"""Services of the operating system: processes, systemd's notifications, threads and limits.

A daemon starts all its threads at its own start, because a later start of a thread may fail.
"""

import asyncio
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from swapd.shared import fds
from swapd.shared.config import NOTIFY_VARIABLE, variable
from swapd.shared.errors import UserError
from swapd.shared.fds import OwnedFd, is_shortage

log = logging.getLogger("swapd.shared.system")


def open_pidfd(pid: int) -> OwnedFd | None:
    """Return a descriptor that is readable once the process has ended; None if it has already.

    A process has ended when all its threads are gone and its files closed. Raises: OSError if no
    descriptor is left.
    """
    try:
        fd = OwnedFd(os.pidfd_open(pid))
    except OSError as exc:
        if is_shortage(exc):
            raise
        return None  # gone, or in another pid namespace, where EOF is the only sign
    poll = select.poll()
    poll.register(fd.fileno(), select.POLLIN)
    if poll.poll(0):
        fd.close()
        return None
    return fd


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, with all its threads; False if the system does not say.

    A first thread without memory proves nothing: other threads may run for a while.
    """
    try:
        watch = open_pidfd(pid)
    except OSError:
        return False
    if watch is None:
        return True
    watch.close()
    return False


def is_alive(pid: int) -> bool:
    """Return whether a process runs, for status only: it may be ending. True if unknown."""
    return not has_ended(pid) and _has_memory(pid)


def private_bytes(pid: int, name: str) -> int:
    """Return the bytes of memfds of this name that a process has mapped privately; 0 if it is gone
    or not readable."""
    total, memfd = 0, f"/memfd:{name}".encode()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            if memfd not in line:
                continue  # skip most of thousands of lines before parsing, which is slow
            span, access, _, _, _, *path = line.split(maxsplit=5)
            if path and access.endswith(b"p") and path[0].startswith(memfd):
                start, end = span.split(b"-")
                total += int(end, 16) - int(start, 16)
    return total


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in b"tT"
    except OSError:
        return False


def has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def notify_systemd(state: str, files: Sequence[int] = ()) -> None:
    """Send systemd a state, if it listens: "READY=1", "WATCHDOG=1", "STOPPING=1", or "FDSTORE=1"
    with files to hold."""
    address = variable(NOTIFY_VARIABLE)
    if address is None:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            socket.send_fds(sock, [state.encode()], list(files))
    except OSError as exc:
        log.warning("cannot tell systemd %s: %s", state.partition("\n")[0], exc.strerror)


def _has_memory(pid: int) -> bool:
    """Return whether the first thread of a process has memory.

    A killed process gives up its memory, then its sockets, and exists a moment longer, for which a
    status need not wait.
    """
    try:
        return Path(f"/proc/{pid}/statm").read_bytes().split()[0] != b"0"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True  # unknown: `has_ended` decides


P = ParamSpec("P")
T = TypeVar("T")

OF_THREADS = (
    "`ulimit -u` (LimitNPROC, TasksMax in a unit), the container's limit of pids, or `ulimit -v`"
)


class LimitError(UserError):
    """The message names the limit to raise."""


def raise_open_files() -> None:
    """Raise the limit of descriptors to its maximum. Raises: LimitError if that is too low."""
    most = fds.raise_limit()
    if most < fds.LEAST:
        raise LimitError(
            f"a daemon needs {fds.LEAST} open files, and this process may have {most}: set "
            f"`ulimit -n {fds.LEAST}` or more (LimitNOFILE in a unit); each component takes one, "
            "each session three"
        )


class Threads(ThreadPoolExecutor):
    """Threads that all run from the start."""

    def __init__(self, threads: int, name: str) -> None:
        """Raises: LimitError."""
        super().__init__(threads, name)
        meeting = threading.Barrier(threads)
        try:
            # Each task holds one thread until all have come, so each needs its own.
            wait([self.submit(meeting.wait) for _ in range(threads)])
        except (RuntimeError, MemoryError) as exc:
            meeting.abort()
            self.shutdown(cancel_futures=True)
            raise no_thread(name) from exc

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call in one of the threads. Cancelling drops a call that has not begun; a running
        one goes on."""
        return await asyncio.wrap_future(self.submit(call, *args, **kwargs))


def process_lock() -> Any:
    """Return an RLock that is free in a forked child, whichever thread of the parent has it."""
    lock: Any = threading.RLock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)
    return lock


def start(thread: threading.Thread) -> None:
    """Raises: LimitError."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as exc:
        raise no_thread(thread.name) from exc


@contextmanager
def repeated(look: Callable[[], object], pause_s: Callable[[], float]) -> Iterator[None]:
    """Have a thread call `look` after each pause while the block runs."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(pause_s()):
            look()

    thread = threading.Thread(target=run, name="swapd-looks")
    try:
        start(thread)
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def no_thread(name: str) -> LimitError:
    return LimitError(
        f"the thread {name} cannot be started: this process may have no more. Raise {OF_THREADS}"
    )
