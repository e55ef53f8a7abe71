"""Reads one daemon for a live view, in its own thread: its stream, and its status.

It never falls behind for long: beyond TAKEN_MAX records at once it skips some, and asks for the
status instead. It waits for a daemon that is gone.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq

import swapd_client
from swapd.cli.common import OWN_LABEL
from swapd.cli.live.watch import Watch
from swapd.log.history import Line, last_run, parsed
from swapd.shared import runtime_dir
from swapd.shared.runtime_dir import RuntimeDirError
from swapd_client import Client
from swapd_client.errors import NotAnswering, NotRunning, SwapdError
from swapd_client.session.endpoint import find

LABEL = f"{OWN_LABEL}top"
#: Most records taken from the stream at once; of so many, only the last KEPT_MAX are kept.
TAKEN_MAX = 10_000
KEPT_MAX = 500
#: Records noted under the lock at once, while drawing waits.
_NOTED_AT_ONCE = 500
#: Bytes of the past that it reads.
PAST_BYTES = 1 << 20
#: Seconds between two requests for the status, and between two attempts to connect.
_ASK_S = 2.0
_RETRY_S = 0.5
_WAKE_MS = 100


class Feed:
    """A `watch` that is up to date from `start` to `close`. Hold `lock` to read it."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.lock = threading.Lock()
        self.watch = Watch()
        #: The current problem, for people; "" if there is none.
        self.amiss = ""
        #: Counts up with every change.
        self.version = 0
        #: Number of daemons that it has connected to.
        self.runs = 0
        self.client: Client | None = None
        self._folder, self._timeout = folder, timeout
        self._behind_s = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Connect, then read. Raises: SwapdError, OSError if no daemon is there at the start."""
        connection = _Connection(self._folder, self._timeout)
        self._begin(connection)
        self._thread = threading.Thread(
            target=self._run, args=(connection,), name="swapd-top", daemon=True
        )
        self._thread.start()

    def close(self, within_s: float | None = None) -> None:
        """End the thread and the connection. Blocks until a pending answer came, or for `within_s`:
        then the end of the process ends them."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(within_s)

    @property
    def now(self) -> float:
        """Unix time, by the clock of the records."""
        return time.monotonic() - self._behind_s

    def _run(self, connection: "_Connection") -> None:
        try:
            while not self._ended.is_set():
                self._follow(connection)
                connection.close()
                while not self._ended.wait(_RETRY_S):
                    if (found := self._again()) is not None:
                        connection = found
                        break
        finally:
            connection.close()

    def _again(self) -> "_Connection | None":
        """A connection to the next daemon; None if there is none yet."""
        try:
            connection = _Connection(self._folder, self._timeout)
        except (NotRunning, RuntimeDirError, OSError):
            return None
        except SwapdError as exc:  # it is there, and refuses
            with self.lock:
                self._say(str(exc))
            return None
        self._begin(connection)
        return connection

    def _begin(self, connection: "_Connection") -> None:
        """Start with a daemon: read its past, then its status."""
        watch = Watch()
        for line in connection.past():
            watch.note(line.record)
        watch.told(connection.status, watch.picture.time)
        with self.lock:
            self.watch, self.client = watch, connection.client
            self.runs += 1
            self._set_clock(watch.picture.time)
            self._say("")

    def _follow(self, connection: "_Connection") -> None:
        """Read until the daemon is gone."""
        ask_at = time.monotonic()
        while not self._ended.is_set():
            fresh = connection.take()
            for at in range(0, len(fresh), _NOTED_AT_ONCE):
                self._note(fresh[at : at + _NOTED_AT_ONCE])
            if connection.client.session.error is not None:
                with self.lock:
                    self.client = None
                    self._say("the daemon is gone; waiting for it to come back")
                return
            if time.monotonic() >= ask_at:
                ask_at = time.monotonic() + _ASK_S
                self._ask(connection)

    def _note(self, fresh: list[Line]) -> None:
        if not fresh:
            return
        with self.lock:
            for line in fresh:
                if line.record.seq > self.watch.picture.seq:
                    self.watch.note(line.record)
            self._set_clock(fresh[-1].record.time)
            self.version += 1

    def _ask(self, connection: "_Connection") -> None:
        before = self.watch.picture.seq
        try:
            status = connection.client.status(timeout=self._timeout)
        except NotAnswering as exc:
            with self.lock:
                self._say(str(exc))
        except SwapdError:
            return  # it is gone: the session has the error
        else:
            fresh = connection.take(0)
            self._note(fresh)
            with self.lock:
                quiet = not fresh and before == self.watch.picture.seq
                self.watch.told(status, self.now, quiet=quiet)
                self._say("")

    def _set_clock(self, record_time: float) -> None:
        """Set the clock: the last record is at most a moment old."""
        self._behind_s = time.monotonic() - record_time

    def _say(self, amiss: str) -> None:
        self.amiss = amiss
        self.version += 1


class _Connection:
    """A session, and the stream. Raises: SwapdError, OSError if there is no daemon."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self._context = zmq.Context()
        self._feed = self._context.socket(zmq.SUB)
        try:
            self._feed.setsockopt(zmq.RCVHWM, TAKEN_MAX)
            self._feed.subscribe(b"")
            with find(folder) as found:
                self._feed.connect(f"ipc://{found.inside / runtime_dir.EVENTS}")
                self.client = swapd_client.connect(folder, label=LABEL, timeout=timeout)
                self._poller = zmq.Poller()
                self._poller.register(self._feed, zmq.POLLIN)
                self._poller.register(self.client.session.life.ended.fileno(), zmq.POLLIN)
                self.status = self.client.status(timeout=timeout)
        except BaseException:
            self.close()
            raise

    def past(self) -> Sequence[Line]:
        """The last records of the file; none if it is unreadable, as the view works without."""
        try:
            with Path(self.status.swap_log).open("rb") as log:
                end = log.seek(0, 2)
                log.seek(max(end - PAST_BYTES, 0))
                data = log.read()
        except OSError:
            return []
        return last_run(list(parsed(data[: data.rfind(b"\n") + 1].split(b"\n"))))

    def take(self, wait_ms: int = _WAKE_MS) -> list[Line]:
        """New records, or none after a moment. Of TAKEN_MAX, only the last KEPT_MAX."""
        self._poller.poll(wait_ms)
        packets: list[bytes] = []
        with suppress(zmq.Again):
            while len(packets) < TAKEN_MAX:
                packets.append(self._feed.recv(zmq.NOBLOCK))
        if len(packets) == TAKEN_MAX:
            packets = packets[-KEPT_MAX:]
        return list(parsed(packets))

    def close(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
        self._context.destroy(linger=0)
