"""Real daemons and real workers, each a process of its own, for the tests of the guarantees.

Tests wait for messages, records of the swap log, EOF and exits, never for time. PATIENCE_S bounds
every wait, with a large margin over any working run.
"""

import json
import os
import queue
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import zmq

from swapd import spawn
from swapd.core.events import SessionGone, SessionOpened, SessionRequest
from swapd.log import reader, records
from swapd.log.records import Record, SchemaMismatch
from swapd.shared import protocol, runtime_dir
from swapd.shared.fds import OwnedFd, recv_packet, send_packet
from swapd.shared.protocol import LIFELINE_MAX_BYTES, AnyReply, AnyRequest, FromDaemon
from swapd_client import Client, connect
from tests import forked

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("worker.py")
MIB = 1 << 20
#: Slower tests set another value (`tests/vllm`).
PATIENCE_S = 60.0

#: The default settings of daemons: strict, and quick to decide.
SETTINGS: dict[str, object] = {
    "device": "host",
    "budget": "16MiB",
    "isolation": "strict",
    "ack_timeout": 30,
    "residency_factor": 0,
    "residency_bound": 0,
}


def environment() -> dict[str, str]:
    """The environment of this process, without settings of swapd, and with its packages on the
    path.
    """
    return {**spawn.environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}


def descriptors(pid: int) -> list[str]:
    """The open files of a process, without the swap log, which it opens and closes at any time."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(fd.readlink()))
    return sorted(name for name in found if not name.endswith("swap-log.jsonl"))


def limits(**most: int) -> Callable[[], None]:
    """For a child, before it runs: at most this much of each resource."""
    if "STACK" in most:  # it counts for the threads of a new program, not of one that is forked
        return lambda: _limit(most)
    return partial(_limit, most)


def _limit(most: dict[str, int]) -> None:
    for name, value in most.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until it has taken effect: then the process is stopped.

    For a child of this process, whose state the kernel reports by waitid.
    """
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def await_end(process: "subprocess.Popen[Any]") -> int:
    """The exit status of a child, as soon as it has ended: `Popen.wait` with a timeout polls at
    intervals of 50 ms. Raises: TimeoutExpired.
    """
    if process.poll() is None:
        watch = os.pidfd_open(process.pid)
        try:
            select.select([watch], [], [], PATIENCE_S)
        finally:
            os.close(watch)
    return process.wait(0)


# --- daemons -----------------------------------------------------------------------------


class Daemon:
    """`swapd serve` in a folder of its own, and its output."""

    def __init__(self, folder: Path, log: Path, **settings: Any) -> None:
        """Start it. Among the settings, `before` is called in the process first, `program`
        replaces `swapd`, and `watched` is False for one that may die at any time.

        Blocks until it serves, or has ended.
        """
        before: Callable[[], None] | None = settings.pop("before", None)
        program = settings.pop("program", "swapd")
        self._is_watched: bool = settings.pop("watched", True)
        self.folder = folder
        self._log = log
        command = [sys.executable, "-m", program, "serve"]
        for name, value in {**SETTINGS, **settings, "runtime_dir": folder}.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        with log.open("ab") as stderr:
            self._process = forked.Popen(
                command,
                env=environment(),
                preexec_fn=before,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._file = None if "swap_log" in settings else self.swap_log  # others may be no file
        self._watch: Watch | None = None
        self._observer: Client | None = None
        self._await_greeting()

    def _await_greeting(self) -> None:
        assert self._process.stdout is not None
        self.greeting = self._process.stdout.readline()
        if self.greeting and self._is_watched:
            self._watch = Watch(self.folder, self._file)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def swap_log(self) -> Path:
        """The default file, which the setting `swap_log` may replace."""
        return self.folder / runtime_dir.SWAP_LOG

    @property
    def log(self) -> str:
        """All of its stderr."""
        return self._log.read_text()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def watch(self) -> "Watch":
        assert self._watch is not None, f"the daemon did not start: {self.log}"
        return self._watch

    @property
    def observer(self) -> Client:
        """A session that only queries."""
        if self._observer is None:
            self._observer = connect(self.folder, label="observer")
        return self._observer

    def status(self) -> protocol.Status:
        return self.observer.status()

    def component(self, name: str) -> protocol.ComponentStatus:
        (found,) = [c for c in self.status().components if c.name == name]
        return found

    def await_record(self, kind: str, **fields: object) -> Any:
        """The next event or action of this kind and these values, once it is logged."""
        return self.watch.until(kind, **fields)

    def await_gone(self, who: "Worker | RawSession") -> None:
        """Wait until the daemon has ended the last session of `who`."""
        if isinstance(who, RawSession):
            session = who.session
        else:
            opened = self.watch.seen("SessionOpened")
            session = [one.session for one in opened if one.label == who.label][-1]
        self.watch.until_gone(session)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await_end(self._process)

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._process.kill()
        self.wait()

    def upgrade(self) -> None:
        """Replace its program by another of this version; returns when that serves."""
        self._disconnect()
        self._process.send_signal(signal.SIGUSR2)
        self._await_greeting()

    def close(self) -> None:
        """Stop it, unless it has ended, and check that it is unharmed."""
        running = self.running
        if running:
            assert self.status().peak_bytes <= self.status().budget_bytes
        self.discard()
        if running:
            assert self._process.returncode == 0, self.log
            assert not list(self.folder.glob("*.sock"))
        assert "Traceback" not in self.log, self.log

    def discard(self) -> None:
        """Stop it, by SIGKILL if necessary, and close the connections to it."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self._process.kill()
                self.wait()
        self._disconnect()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _disconnect(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None


class Watch:
    """The swap log of a daemon as it is published, with the records from before the subscription.

    A client that waits for the daemon may connect before this has subscribed.
    """

    def __init__(self, folder: Path, file: Path | None) -> None:
        """`file` is the swap log; None: it cannot be read, and the earlier records are missing."""
        self.history: list[Record] = []
        self._folder = folder
        self._at = 0
        self._knocks = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(f"ipc://{folder / runtime_dir.EVENTS}")
        for _ in range(600):  # the first may precede the subscription at the daemon
            self._knock()
            if self._socket.poll(100):
                break
        else:
            raise AssertionError("the daemon publishes no records")
        if file is not None:
            self._catch_up(file)

    def until(self, kind: str, **fields: object) -> Any:
        """The next event or action that matches, after the last one found.

        A request matches by its own kind; its session may be among the fields.
        """
        while True:
            while self._at < len(self.history):
                record = self.history[self._at]
                self._at += 1
                asked_by, said = _said(record)
                if type(said).__name__ == kind and all(
                    (asked_by if name == "session" and asked_by else getattr(said, name)) == value
                    for name, value in fields.items()
                ):
                    return said
            self._read(f"{kind} {fields}")

    def until_gone(self, session: int) -> None:
        """Read on until this session has ended, if it has not by now."""
        at = 0
        while True:
            for record in self.history[at:]:
                if isinstance(record.event, SessionGone) and record.event.session == session:
                    return
            at = len(self.history)
            self._read(f"end of session {session}")

    def seen(self, kind: str) -> list[Any]:
        """All records of one kind until now."""
        label = self._knock()
        while True:
            self._read(label)
            last = self.history[-1].event
            if isinstance(last, SessionOpened) and last.label == label:
                break
        said = [_said(record)[1] for record in self.history]
        return [one for one in said if type(one).__name__ == kind]

    parse = staticmethod(records.parse)

    def _catch_up(self, file: Path) -> None:
        """Prepend the records from before the first one published here.

        The file will contain that one: the daemon publishes a record before it writes it.
        """
        first = self._socket.recv()
        self.history.append(self.parse(first))
        while (before := _until(first, file)) is None:
            self._knock()
            self._read("record of a knock")
        self.history[:0] = before

    def _knock(self) -> str:
        """Cause a record: a session with the returned label."""
        self._knocks += 1
        label = f"knock {self._knocks}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knock:
            knock.connect(str(self._folder / runtime_dir.LIFELINE))
            send_packet(knock, protocol.encode(protocol.Hello(protocol.VERSION, label)))
            _, fds = recv_packet(knock, LIFELINE_MAX_BYTES)
            for fd in fds:
                fd.close()
        return label

    def _read(self, what: str) -> None:
        if not self._socket.poll(int(PATIENCE_S * 1000)):
            told = "\n".join(str(record.event or record.action) for record in self.history)
            raise AssertionError(f"no {what} in the swap log:\n{told}")
        self.history.append(self.parse(self._socket.recv()))

    def close(self) -> None:
        self._context.destroy(linger=0)


def _until(first: bytes, file: Path) -> list[Record] | None:
    """The events and actions of a daemon before `first`; None if it is not written yet."""
    with suppress(FileNotFoundError, SchemaMismatch):
        run = reader.last_run(reader.read(file))
        for i, line in enumerate(run):
            if line.raw == first:
                return [one.record for one in run[:i] if one.record.start is None]
    return None


def _said(record: Record) -> tuple[int | None, Any]:
    """The content of a record: the session and its request, else the event or action."""
    said = record.event or record.action
    return (said.session, said.request) if isinstance(said, SessionRequest) else (None, said)


# --- workers -----------------------------------------------------------------------------


class WorkerError(Exception):
    """A command failed in the worker: `kind` is the name of its exception's class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class WorkerDied(Exception):
    """The worker ended before it answered."""


class Pending:
    """A command in progress in a worker."""

    def __init__(self, worker: "Worker", what: str) -> None:
        self._worker = worker
        self._what = what
        self._answer: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def settle(self, answer: dict[str, Any] | None) -> None:
        self._answer.put(answer)

    @property
    def done(self) -> bool:
        return not self._answer.empty()

    def result(self) -> Any:
        """Its return value. Blocks. Raises: WorkerError, WorkerDied."""
        try:
            answer = self._answer.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"{self._worker} never ended {self._what}") from None
        if answer is None:
            raise WorkerDied(f"{self._worker} died in {self._what}\n{self._worker.log}")
        if "error" in answer:
            raise WorkerError(answer["error"], answer["message"])
        return answer["ok"]


class Worker:
    """A process of `worker.py`: `worker.acquire("a")` has it call its method `acquire`.

    `worker.start("acquire", "a", lane="x")` does not wait for the answer.
    """

    def __init__(self, log: Path, label: str, program: Path, imported: Sequence[str]) -> None:
        """`label` is its label at its daemon."""
        self.label = label
        self._log = log
        with log.open("ab") as stderr:
            self._process = forked.Popen(
                [sys.executable, str(program)],
                imported=imported,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._ids = 0
        self._pending: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<Worker {self.label} {self.pid}>"

    def __getattr__(self, command: str) -> Callable[..., Any]:
        if command.startswith("_"):
            raise AttributeError(command)
        return lambda *args, **options: self.start(command, *args, **options).result()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def start(self, command: str, *args: object, lane: str = "main", **options: object) -> Pending:
        """Have it run `command`; commands of one lane run in sequence."""
        with self._lock:
            self._ids += 1
            number = self._ids
            pending = self._pending[number] = Pending(self, f"{command}{args}")
        line = {"id": number, "lane": lane, "do": command, "args": args, "options": options}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pending.settle(None)
        return pending

    def await_event(self) -> str:
        """The next message that it sends by itself."""
        event = self._events.get(timeout=PATIENCE_S)
        if event is None:
            raise WorkerDied(f"{self} died\n{self.log}")
        return event

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._process.kill()
        self.wait()

    def stop(self) -> None:
        """SIGSTOP; returns when it has stopped."""
        stop_process(self.pid)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait(self) -> int:
        """Its exit status, negative for a signal, once it has ended."""
        status = await_end(self._process)
        self._reader.join(PATIENCE_S)
        return status

    def close(self) -> None:
        """End it, if it has not ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self.wait()
        with self._lock:
            self._process.stdout.close()
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "event" in message:
                self._events.put(message["event"])
                continue
            with self._lock:
                pending = self._pending.pop(message["id"])
            pending.settle(message)
        self._events.put(None)
        with self._lock:
            for pending in self._pending.values():
                pending.settle(None)


# --- faulty peers ------------------------------------------------------------------------


class RawSession:
    """A lifeline and an rpc socket in this process, without a client: sends any message."""

    def __init__(self, folder: Path, *, hello: bool = True, rpc: bool = True) -> None:
        self.lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lifeline.settimeout(PATIENCE_S)
        self.lifeline.connect(str(folder / runtime_dir.LIFELINE))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealers: list[zmq.Socket[bytes]] = []
        #: All descriptors received on the lifeline.
        self.fds: list[OwnedFd] = []
        self._ids = 0
        self.token = b""
        self.session = 0
        if hello:
            self.tell(protocol.Hello(protocol.VERSION, "raw"))
            welcome = self.hear()
            assert isinstance(welcome, protocol.Welcome)
            self.token, self.session = welcome.token, welcome.session
        if rpc:
            self.rpc = self.dealer(folder, self.token + b"\0\0\0\0")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lifeline.close()
        self._context.destroy(linger=0)
        for fd in self.fds:
            fd.close()

    def dealer(self, folder: Path, identity: bytes) -> "zmq.Socket[bytes]":
        rpc = self._context.socket(zmq.DEALER)
        rpc.setsockopt(zmq.ROUTING_ID, identity)
        rpc.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        rpc.connect(f"ipc://{folder / runtime_dir.RPC}")
        self._dealers.append(rpc)
        return rpc

    def tell(self, message: protocol.FromClient) -> None:
        send_packet(self.lifeline, protocol.encode(message))

    def hear(self) -> FromDaemon | None:
        """The next message on the lifeline, except files; None when it has ended."""
        while True:
            data, fds = recv_packet(self.lifeline, LIFELINE_MAX_BYTES)
            self.fds += fds
            message = protocol.decode_from_daemon(data) if data else None
            if not isinstance(message, protocol.Files):
                return message

    def end(self) -> list[FromDaemon]:
        """All further messages until the daemon ends the lifeline."""
        said: list[FromDaemon] = []
        while True:
            try:
                message = self.hear()
            except ConnectionResetError:
                continue  # it closed with our messages unread; its own messages follow
            if message is None:
                return said
            said.append(message)

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    def ask(self, request: AnyRequest) -> AnyReply:
        self.rpc.send(protocol.encode(request))
        return self.answer()

    def answer(self) -> AnyReply:
        reply: AnyReply = protocol.decode_reply(self.rpc.recv())
        return reply

    def register(self, name: str, nbytes: int, *, mutable: bool = False) -> None:
        """Register zeros."""
        said = self.ask(protocol.Register(self.next_id(), name, nbytes, mutable=mutable))
        assert isinstance(said, protocol.Done), said
        assert isinstance(self.hear(), protocol.Master)
        said = self.ask(protocol.Commit(self.next_id(), name))
        assert isinstance(said, protocol.Done), said

    def acquire(self, *names: str) -> protocol.Granted:
        said = self.ask(protocol.Acquire(self.next_id(), names))
        assert isinstance(said, protocol.Granted), said
        return said

    def release(self, granted: protocol.Granted) -> None:
        said = self.ask(protocol.Release(self.next_id(), granted.id, ack=True))
        assert isinstance(said, protocol.Done), said


# --- the processes of one test -----------------------------------------------------------


class World:
    """The daemons and workers of one test, and their folder."""

    def __init__(self, folder: Path, program: Path, imported: Sequence[str]) -> None:
        self.folder = folder
        self._program = program
        self._imported = imported
        self._daemons: list[Daemon] = []
        self._workers: list[Worker] = []

    def daemon(self, name: str = "d", **settings: object) -> Daemon:
        """Start a daemon; of the same name, one in the same folder."""
        log = self.folder / f"{name}.{len(self._daemons)}.log"
        daemon = Daemon(self.folder / name, log, **settings)
        self._daemons.append(daemon)
        return daemon

    def worker(self, daemon: Daemon, label: str) -> Worker:
        """Start a worker; it connects at its first command."""
        log = self.folder / f"worker{len(self._workers)}.log"
        worker = Worker(log, label, self._program, self._imported)
        self._workers.append(worker)
        worker.start("meet", str(daemon.folder), label)
        return worker

    def workers(self, daemon: Daemon, *labels: str) -> list[Worker]:
        return [self.worker(daemon, label) for label in labels]

    def close(self) -> None:
        """End all that run; check that no daemon was harmed."""
        for worker in self._workers:
            worker.close()
        for daemon in self._daemons:
            daemon.close()

    def discard(self) -> None:
        for worker in self._workers:
            worker.close()
        for daemon in self._daemons:
            daemon.discard()


@contextmanager
def world(program: Path = PROGRAM, imported: Sequence[str] = ()) -> Iterator[World]:
    """The workers run `program`: worker.py, or an extension of it.

    `imported`: the slow imports that they need, such as torch.
    """
    folder = Path(tempfile.mkdtemp(prefix="swapd-", dir="/tmp"))  # short, since sockets are in it
    made = World(folder, program, imported)
    try:
        yield made
        made.close()
    finally:
        made.discard()
        shutil.rmtree(folder, ignore_errors=True)


def await_exit(pid: int) -> None:
    """Wait until a process that is not our child is gone."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([watch], [], [], PATIENCE_S)[0], f"process {pid} does not end"
    finally:
        os.close(watch)


__all__ = [
    "MIB",
    "Daemon",
    "Pending",
    "RawSession",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "World",
    "await_exit",
    "descriptors",
    "environment",
    "is_alive",
    "limits",
    "stop_process",
    "world",
]
