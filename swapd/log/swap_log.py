"""The swap log: one numbered record for each event and each action, with its cause.

The ZeroMQ stream and the file have the same lines (`records.py`). Writing never blocks the core: a
thread writes the file. If the disk is full or too slow, the file loses records, and later gets
their number; subscribers miss nothing.
"""

import asyncio
import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.log.records import (
    Head,
    Parts,
    Record,
    Start,
    began,
    parse,
    parts_of,
    render,
    render_all,
)
from swapd.shared import runtime_dir, system
from swapd.shared.config import Config
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import NOT_ENCODABLE
from swapd.shared.runtime_dir import SWAP_LOG, Folder

log = logging.getLogger("swapd.log.swap_log")

#: How long records wait to be rendered and written together.
BATCH_S = 0.02
#: Records to render before other work has its turn.
BATCH = 250
#: Most bytes that wait for the disk. Beyond, the oldest records are dropped.
QUEUE_MAX_BYTES = 16 << 20
#: The time of a line is within its first bytes.
_HEAD_BYTES = 256
_LOCK = "swap-log.lock"
#: Time limit for writing the last records.
CLOSE_S = 1.0


class SwapLog:
    """Numbers records, renders them, and hands them to a publisher and a file."""

    def __init__(
        self,
        file: "SwapLogFile",
        publish: Callable[[Sequence[bytes]], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Takes over `file`, and closes it."""
        self.path = file.path
        self._file = file
        self._publish = publish
        self._loop = loop
        self._seq = 0
        self._pending: Parts = []
        self._timer: asyncio.TimerHandle | None = None
        #: Wall time at monotonic time 0: saves reading a second clock for every record.
        self._epoch = time.time() - time.monotonic()  # noqa: TID251

    def start(self, start: Start) -> None:
        self._seq += 1
        self._hand_over([render(Record(self._seq, 0, self._epoch + time.monotonic(), start=start))])

    def event(self, event: AnyEvent, cause: int) -> int:
        """Return the number of the record: the cause of the event's actions."""
        return self.action(event, cause, event.now)

    def action(self, item: AnyEvent | AnyAction, cause: int, now: float) -> int:
        """Return the number of the record."""
        self._seq = seq = self._seq + 1
        self._pending += parts_of(seq, self._epoch + now, cause, item)
        if self._timer is None:
            self._timer = self._loop.call_later(BATCH_S, self._due)
        return seq

    def counted(self) -> tuple[int, int]:
        """Return how many records there are, and how many of them the file lost."""
        return self._seq, self._file.lost

    def limit(self, max_bytes: int, max_age_s: float) -> None:
        self._file.max_bytes = max_bytes
        self._file.max_age_s = max_age_s

    def flush(self) -> None:
        """Hand over all pending records, without waiting for the disk."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._pending:
            self._flush_some()

    def _flush_some(self) -> None:
        parts, self._pending = self._pending[: 2 * BATCH], self._pending[2 * BATCH :]
        if parts:
            self._hand_over(_rendered(parts))

    def _hand_over(self, lines: list[bytes]) -> None:
        self._publish(lines)
        self._file.write(lines)

    def _due(self) -> None:
        self._timer = None
        self._flush_some()
        if self._pending:
            self._timer = self._loop.call_later(0, self._due)

    def close(self) -> None:
        """Flush, and wait until the file has everything, at most CLOSE_S."""
        self.flush()
        self._file.close()


def _rendered(parts: Parts) -> list[bytes]:
    try:
        return render_all(parts)
    except NOT_ENCODABLE:
        return [_rendered_one(parts[i : i + 2]) for i in range(0, len(parts), 2)]


def _rendered_one(parts: Parts) -> bytes:
    try:
        (line,) = render_all(parts)
    except NOT_ENCODABLE as exc:
        head, said = parts
        assert isinstance(head, Head)
        what = type(said).__name__
        log.error("cannot write record %d of the swap log, %s: %s", head.seq, what, exc)
        line = render(Record(head.seq, head.cause, head.t, dropped=1))
    return line


class SwapLogFile:
    """Appends lines to a file in a thread of its own, rotates the file, and survives a full disk.

    `write` never waits: lines that the disk does not take in time are dropped and counted. Each
    write opens the file anew, so it may be moved away; other users cannot replace it
    (`runtime_dir`).
    """

    def __init__(
        self, path: Path, max_bytes: int, max_age_s: float, folder: Folder | None = None
    ) -> None:
        """`folder`: the open folder of `path`, if the caller has it."""
        self.path = path
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s
        self._folder = folder
        #: Inode of the file, and time of its first record.
        self._begun: tuple[int, float] = (0, 0.0)
        #: Batches of lines that wait, and their bytes. `_change` guards these and all fields up to
        #: itself.
        self._queue: deque[list[bytes]] = deque()
        self._queued_bytes = 0
        self._skipped = 0
        self._behind = False
        self._closed = False
        self._change = threading.Condition()
        #: Lines lost since the last successful write, and in all.
        self._dropped = 0
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name="swapd-swap-log", daemon=True)
        system.start(self._thread)

    def write(self, lines: list[bytes]) -> None:
        with self._change:
            self._queue.append(lines)
            self._queued_bytes += _size(lines)
            while self._queued_bytes > QUEUE_MAX_BYTES and len(self._queue) > 1:
                oldest = self._queue.popleft()
                self._queued_bytes -= _size(oldest)
                if not self._behind:
                    log.error(
                        "swap log %s: the disk is too slow; records are dropped. "
                        "--swap-log puts it elsewhere",
                        self.path,
                    )
                self._behind = True
                self._skipped += len(oldest)
            self._change.notify()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("swap log %s: the disk hangs; the last records are not in it", self.path)

    def _run(self) -> None:
        while (lines := self._next()) is not None:
            try:
                self._append(lines)
            except OSError as exc:
                if not self._dropped:
                    why = exc.strerror or exc
                    log.error(
                        "swap log %s: %s; its records are dropped meanwhile. "
                        "--swap-log puts it elsewhere",
                        self.path,
                        why,
                    )
                self._dropped += len(lines)
                self.lost += len(lines)

    def _next(self) -> list[bytes] | None:
        with self._change:
            self._change.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            lines = self._queue.popleft()
            self._queued_bytes -= _size(lines)
            self._dropped += self._skipped
            self.lost += self._skipped
            self._skipped = 0
            self._behind = self._behind and bool(self._queue)
            return lines

    def _append(self, lines: list[bytes]) -> None:
        if self._dropped:
            first = parse(lines[0])
            note = Record(first.seq, 0, first.time, dropped=self._dropped)
            lines = [render(note), *lines]
        data = b"\n".join(lines) + b"\n"
        with self._opened(data) as file:
            fd = file.fileno()
            start = os.fstat(fd).st_size
            if start and os.pread(fd, 1, start - 1) != b"\n":
                data = b"\n" + data  # a crash cut the last line short; keep ours whole
            if os.write(fd, data) < len(data):
                os.ftruncate(fd, start)  # whole lines, or none
                raise OSError("disk full")
        self._dropped = 0

    def _opened(self, more: bytes) -> OwnedFd:
        """Return the file, rotated if `more` does not fit or comes too late."""
        with self._its_folder() as folder:
            file = self._open_in(folder)
            if self._is_over(file.fileno(), more):
                file.close()
                at, name = folder.fileno(), self.path.name
                os.replace(name, f"{name}.1", src_dir_fd=at, dst_dir_fd=at)
                file = self._open_in(folder)
            return file

    def _is_over(self, fd: int, more: bytes) -> bool:
        found = os.fstat(fd)
        if found.st_size == 0:
            return False
        if self._begun[0] != found.st_ino:
            self._begun = found.st_ino, began(os.pread(fd, _HEAD_BYTES, 0), found.st_mtime)
        # both by the clock at the daemon's start: another may have been set since
        too_old = began(more, found.st_mtime) - self._begun[1] > self.max_age_s
        return too_old or found.st_size > self.max_bytes - len(more)

    def _its_folder(self) -> OwnedFd:
        if self._folder is not None:
            return self._folder.descriptor()
        return runtime_dir.folder_named(self.path)

    def _open_in(self, folder: OwnedFd) -> OwnedFd:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        if self._folder is not None:  # other users can put no links there
            return runtime_dir.open_in(folder, self.path.name, flags)
        return runtime_dir.open_named(self.path, flags)


def _size(lines: list[bytes]) -> int:
    return sum(map(len, lines))


def place(config: Config, own: Folder) -> tuple[Path, Folder | None, OwnedFd | None]:
    """Return the file; its folder if that is `own`, the runtime folder; and a lock on the state
    folder, to keep while the file is written. Makes the state folder. If it cannot be made, or
    another daemon has it, or others could write there, the log goes to `own`, with a warning: a
    daemon without a home should run too."""
    path = config.swap_log_path
    if config.swap_log:
        return path, None, None
    if path.parent == own.path:
        return path, own, None
    try:
        with runtime_dir.open_folder(path.parent, make=True) as folder:
            runtime_dir.check_folder(folder, path.parent)
            return path, None, _locked(folder)
    except OSError as exc:
        why = exc.strerror or exc
        log.warning("the swap log is in %s, not in %s: %s", own.path, path.parent, why)
        return own.path / SWAP_LOG, own, None


def _locked(folder: OwnedFd) -> OwnedFd:
    """Lock a state folder. A daemon of another runtime folder, or of another machine that shares
    the home, has the same. Raises: OSError."""
    lock = runtime_dir.open_in(folder, _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        lock.close()
        raise OSError(exc.errno, "another swapd writes there") from exc
    except OSError:
        pass  # some file systems have no locks
    return lock
