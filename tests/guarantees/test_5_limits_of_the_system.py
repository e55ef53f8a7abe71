"""Guarantee 5, of limited system resources: open files, threads, memory.

A client may take all of them: the daemon lives on and serves the others.
"""

import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from swapd.daemon import zmtp
from swapd.daemon.router import PEERS_MAX
from swapd.shared import protocol
from swapd.shared.fds import recv_packet
from tests.guarantees.harness import (
    MIB,
    PATIENCE_S,
    Daemon,
    RawSession,
    Worker,
    WorkerError,
    World,
    environment,
    limits,
)

RPC, LIFELINE, EVENTS = "rpc.sock", "lifeline.sock", "events.sock"
KINDS = {
    RPC: socket.SOCK_STREAM,
    LIFELINE: socket.SOCK_SEQPACKET,
    EVENTS: socket.SOCK_STREAM,
}
MANY = 1000

#: Takes all that it can, prints the amount, and ends on request.
PROGRAMS = Path(__file__).parent / "programs"
GREEDY = PROGRAMS / "greedy.py"


@contextmanager
def holding(case: str, *arguments: object) -> Iterator[None]:
    """Another process takes all that it can; from its report until the end."""
    command = [sys.executable, str(GREEDY), case, *map(str, arguments)]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{arguments[-1]}\n".encode()
            yield
        finally:
            process.kill()


@contextmanager
def flood(daemon: Daemon, name: str, count: int = MANY) -> Iterator[None]:
    """Another process that has made so many connections, and keeps them open."""
    with holding("connections", daemon.folder / name, int(KINDS[name]), count):
        yield


@contextmanager
def sessions(daemon: Daemon, count: int) -> Iterator[None]:
    """Another process that has asked for so many sessions, and keeps those that it got."""
    with holding("sessions", daemon.folder / LIFELINE, count):
        yield


def open_files(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def memory_of(daemon: Daemon) -> int:
    """Bytes of the daemon that are in memory."""
    pages = Path(f"/proc/{daemon.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


def serves(daemon: Daemon, worker: Worker, name: str) -> None:
    """A worker registers, swaps and unregisters, with the right bytes."""
    expected = worker.register(name, 4 * MIB, seed=4)
    assert worker.use(name)[1] == expected
    worker.unregister(name)
    assert daemon.running


# --- open files: connections ---------------------------------------------------------------


@pytest.mark.parametrize("nofile", [128, 1024])
@pytest.mark.parametrize("name", [RPC, LIFELINE, EVENTS])
def test_a_thousand_connections_of_nobody_cost_nobody_else_anything(
    world: World, name: str, nofile: int
) -> None:
    daemon = world.daemon(before=limits(NOFILE=nofile))
    old, late = world.workers(daemon, "old", "late")
    serves(daemon, old, "a")
    with flood(daemon, name):
        serves(daemon, old, "b")
        serves(daemon, late, "c")
        assert open_files(daemon) < nofile
    serves(daemon, old, "d")


@pytest.mark.parametrize("nofile", [32, 48, 64, 128, 256])
def test_with_few_descriptors_it_says_what_to_set_or_lives_whatever_clients_do(
    world: World, nofile: int
) -> None:
    daemon = world.daemon(before=limits(NOFILE=nofile))
    if not daemon.greeting:
        assert daemon.wait() == 1
        (line,) = daemon.log.splitlines()
        assert "set `ulimit -n" in line
        assert f"may have {nofile}" in line
        return
    worker = world.worker(daemon, "worker")
    serves(daemon, worker, "a")
    with ExitStack() as held:
        for name in (RPC, LIFELINE, EVENTS):
            held.enter_context(flood(daemon, name, 200))
        assert refusal(held, daemon)
        serves(daemon, worker, "b")
    late = world.worker(daemon, "late")
    serves(daemon, late, "c")


def refusal(held: ExitStack, daemon: Daemon) -> str:
    """Open sessions and register components until the daemon refuses both: its message."""
    while True:
        sock = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.settimeout(PATIENCE_S)
        sock.connect(str(daemon.folder / LIFELINE))
        with suppress(BrokenPipeError):
            sock.send(protocol.encode(protocol.Hello(protocol.VERSION, "greedy")))
        said = heard(sock)
        if isinstance(said, protocol.Goodbye):
            assert said.code == "limit"
            return said.message


def heard(sock: socket.socket) -> protocol.FromDaemon:
    try:
        data, fds = recv_packet(sock, protocol.LIFELINE_MAX_BYTES)
    except ConnectionResetError:
        data, fds = recv_packet(sock, protocol.LIFELINE_MAX_BYTES)
    for fd in fds:
        fd.close()
    message: protocol.FromDaemon = protocol.decode_from_daemon(data)
    return message


def test_sessions_past_what_there_is_room_for_are_refused_in_words(world: World) -> None:
    daemon = world.daemon(before=limits(NOFILE=128))
    worker, late = world.workers(daemon, "worker", "late")
    serves(daemon, worker, "a")
    with ExitStack() as held:
        assert "close some" in refusal(held, daemon)
        serves(daemon, worker, "b")
        with sessions(daemon, 16):
            with pytest.raises(WorkerError, match="raise its `ulimit -n`") as refused:
                late.ping()
            assert refused.value.kind == "LimitReached"
            serves(daemon, worker, "c")
    serves(daemon, late, "d")


def test_a_process_may_open_only_so_many_sessions(world: World) -> None:
    daemon = world.daemon()
    worker, late = world.workers(daemon, "worker", "late")
    serves(daemon, worker, "a")
    with ExitStack() as held:
        assert "close some" in refusal(held, daemon)
        serves(daemon, worker, "b")
        serves(daemon, late, "c")


def test_components_past_what_there_is_room_for_are_refused_and_others_may_come(
    world: World,
) -> None:
    daemon = world.daemon(before=limits(NOFILE=128))
    worker = world.worker(daemon, "worker")
    with RawSession(daemon.folder) as greedy:
        for number in range(128):
            said = greedy.ask(protocol.Register(greedy.next_id(), f"g{number}", 1))
            if isinstance(said, protocol.Refused):
                break
        assert isinstance(said, protocol.Refused)
        assert said.code == "limit"
        assert "`ulimit -n`" in said.message
        assert worker.ping()
    daemon.await_gone(greedy)
    serves(daemon, worker, "c")


def test_more_connections_of_a_session_than_it_may_have_are_refused_in_words(
    world: World,
) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    with RawSession(daemon.folder, rpc=False) as raw:
        for number in range(PEERS_MAX + 1):
            dealer = raw.dealer(daemon.folder, raw.token + number.to_bytes(4, "big"))
            dealer.send(protocol.encode(protocol.Release(number, number, ack=True)))
            said = protocol.decode_reply(dealer.recv())
            assert isinstance(said, protocol.Refused) == (number == PEERS_MAX)
        assert isinstance(said, protocol.Refused)
        assert (said.code, said.id) == ("limit", PEERS_MAX)
    serves(daemon, other, "a")


def test_a_lifeline_that_never_says_hello_is_closed(world: World) -> None:
    daemon = world.daemon()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as idle:
        idle.settimeout(PATIENCE_S)
        idle.connect(str(daemon.folder / LIFELINE))
        said = heard(idle)
        assert isinstance(said, protocol.Goodbye)
        assert "no hello" in said.message
        assert idle.recv(1) == b""


def test_an_rpc_connection_of_nobody_is_closed(world: World) -> None:
    daemon = world.daemon()
    with stranger(daemon, RPC, b"DEALER") as sock:
        while sock.recv(1 << 16):
            pass


# --- open files: of a client -----------------------------------------------------------------


def test_a_client_without_descriptors_is_told_and_loses_nothing(world: World) -> None:
    daemon = world.daemon()
    worker, late = world.workers(daemon, "worker", "late")
    a = worker.register("a", 4 * MIB, seed=1)
    worker.use("a")
    worker.allow_descriptors(2)
    for refused in (
        worker.start("register", "b", MIB),
        worker.start("acquire", "a", lane="another thread"),
    ):
        with pytest.raises(WorkerError, match="raise its `ulimit -n`") as said:
            refused.result()
        assert said.value.kind == "LimitReached"
    assert worker.use("a")[1] == a
    worker.allow_descriptors(100)
    serves(daemon, worker, "b")
    assert worker.use("a")[1] == a
    late.allow_descriptors(3)
    with pytest.raises(WorkerError, match="to connect needs") as said:
        late.ping()
    assert said.value.kind == "LimitReached"
    late.allow_descriptors(100)
    serves(daemon, late, "c")


# --- mappings: of a client -------------------------------------------------------------------


@pytest.mark.skipif(
    int(Path("/proc/sys/vm/max_map_count").read_text()) > 200_000,
    reason="more mappings than a test has time for",
)
@pytest.mark.parametrize("isolation", ["strict", "relaxed"])
def test_a_client_with_all_mappings_it_may_have_is_told_and_loses_nothing(
    world: World, isolation: str
) -> None:
    daemon = world.daemon(isolation=isolation)
    worker, other = world.workers(daemon, "worker", "other")
    a = worker.register("a", 6 * MIB, seed=1)
    b = worker.register("b", 6 * MIB, seed=2, mutable=True)
    everything = other.register("all", 16 * MIB, seed=3)
    assert worker.use("b")[1] == b
    assert worker.use("a")[1] == a
    worker.fill_mappings()
    assert other.use("all")[1] == everything  # in place of a and b
    for name, expected in (("a", a), ("b", b)):
        # the kernel may have room for one that is shelved
        with suppress(WorkerError):
            assert worker.use(name)[1] == expected
    with pytest.raises(WorkerError, match=r"raise vm\.max_map_count") as said:
        worker.register("c", MIB)
    assert said.value.kind == "LimitReached"
    assert other.use("all")[1] == everything
    assert worker.ping()  # its session lives
    worker.free_mappings()
    assert worker.use("a")[1] == a
    assert worker.use("b")[1] == b
    serves(daemon, worker, "c")


# --- memory, before a token ----------------------------------------------------------------


@contextmanager
def stranger(
    daemon: Daemon, name: str, kind: bytes, identity: bytes = b""
) -> Iterator[socket.socket]:
    """A ZeroMQ socket without libzmq, after the handshake."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(daemon.folder / name))
        heard = zmtp.Decoder((b"ROUTER", b"PUB"), MIB)
        sock.sendall(zmtp.GREETING)
        heard.feed(sock.recv(64, socket.MSG_WAITALL))
        sock.sendall(zmtp.ready(kind, identity))
        while heard.identity is None:
            heard.feed(sock.recv(1000))
            heard.next()
        yield sock


def endless(sock: socket.socket, frame: bytes, count: int) -> int:
    """Send a frame so often; return the bytes that the daemon accepted before it closed."""
    sent = 0
    with suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(count):
            sock.sendall(frame)
            sent += len(frame)
    return sent


def long_frame(flags: int, size: int) -> bytes:
    return bytes((flags | 2,)) + size.to_bytes(8, "big")


@pytest.mark.parametrize(
    ("name", "kind", "frame", "count"),
    [
        (RPC, b"DEALER", long_frame(1, 60_000) + bytes(60_000), 2000),
        (RPC, b"DEALER", b"\1\0", 1_000_000),
        (RPC, b"DEALER", long_frame(0, 1 << 40) + bytes(1 << 16), 2000),
        (RPC, b"DEALER", long_frame(4, 1 << 30) + bytes(1 << 16), 2000),
        (EVENTS, b"SUB", long_frame(0, 20 * MIB) + bytes(1 << 16), 2000),
        (EVENTS, b"SUB", long_frame(1, 1000) + bytes(1000), 100_000),
    ],
    ids=[
        "unfinished message",
        "unfinished message of empty frames",
        "frame without end",
        "command without end",
        "long subscription",
        "unfinished subscription",
    ],
)
def test_what_nobody_says_without_end_takes_no_memory(
    world: World, name: str, kind: bytes, frame: bytes, count: int
) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    serves(daemon, other, "a")
    before = memory_of(daemon)
    with stranger(daemon, name, kind) as sock:
        assert endless(sock, frame, count) < 8 * MIB
        assert memory_of(daemon) - before < 8 * MIB
        serves(daemon, other, "b")


def test_messages_that_a_session_does_not_finish_take_only_so_much_memory(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    serves(daemon, other, "a")
    before = memory_of(daemon)
    half = long_frame(0, MIB) + bytes(MIB - 1)
    with RawSession(daemon.folder) as raw, ExitStack() as held:
        for number in range(150):
            identity = raw.token + number.to_bytes(4, "big")
            sock = held.enter_context(stranger(daemon, RPC, b"DEALER", identity))
            endless(sock, half, 1)
        assert memory_of(daemon) - before < 100 * MIB
        serves(daemon, other, "b")
        expected = protocol.Done(raw.next_id())
        assert raw.ask(protocol.Release(expected.id, 1, ack=True)) == expected


def test_subscriptions_without_end_take_no_memory(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    with stranger(daemon, EVENTS, b"SUB") as sock:
        with suppress(BrokenPipeError, ConnectionResetError):
            for number in range(100_000):
                sock.sendall(zmtp.frame(b"\1" + number.to_bytes(4, "big")))
        assert number < 99_999
    serves(daemon, other, "a")


# --- threads, and memory -------------------------------------------------------------------


def threads_of(daemon: Daemon) -> set[str]:
    return set(os.listdir(f"/proc/{daemon.pid}/task"))


def test_no_thread_is_started_after_the_start(world: World) -> None:
    daemon = world.daemon()
    before = threads_of(daemon)
    one, two = world.workers(daemon, "one", "two")
    one.register("m", 16 * MIB, mutable=True)
    two.register("b", 16 * MIB)
    for _ in range(3):
        one.use("m")
        two.use("b")
    daemon.status()
    with RawSession(daemon.folder) as raw:
        said = raw.ask(protocol.AcquireWorkspace(raw.next_id(), 4 * MIB))
        assert isinstance(said, protocol.Granted)
    assert threads_of(daemon) == before


def test_a_thread_that_cannot_be_had_is_a_clear_error_at_the_start(world: World) -> None:
    gib = 1 << 30
    daemon = world.daemon(before=limits(STACK=2 * gib, AS=6 * gib))
    assert not daemon.greeting
    assert daemon.wait() == 1
    assert "cannot be started" in daemon.log.splitlines()[-1]
    assert "Traceback" not in daemon.log


def with_threads(daemon: Daemon, threads: int) -> "subprocess.CompletedProcess[str]":
    """A client that can start so many threads, each with a stack of 1 GiB."""
    gib = 1 << 30
    return subprocess.run(
        [sys.executable, PROGRAMS / "few_threads.py", daemon.folder],
        preexec_fn=limits(STACK=gib, AS=(threads + 1) * gib - gib // 16),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("threads", range(6))
def test_threads_that_a_client_cannot_have_are_refused_and_end_no_process(
    world: World, threads: int
) -> None:
    """libzmq would abort. The rest of the process takes up to the space of a stack, too."""
    daemon = world.daemon()
    ran = with_threads(daemon, threads)
    assert (ran.returncode, ran.stderr) == (0, "")
    served = ran.stdout == "served\n"
    if not served:
        assert re.fullmatch(r"refused: .* more threads, .*raise `ulimit -u`.*\n", ran.stdout)
    if threads in (0, 1, 2, 5):
        assert served == (threads == 5)
    serves(daemon, world.worker(daemon, "worker"), "b")


def test_memory_that_cannot_be_had_later_refuses_who_asks_for_it(world: World) -> None:
    daemon = world.daemon()
    worker, late = world.workers(daemon, "worker", "late")
    serves(daemon, worker, "a")
    worker.register("b", 16 * MIB)
    pages = Path(f"/proc/{daemon.pid}/statm").read_text().split()[0]
    now = int(pages) * os.sysconf("SC_PAGESIZE")
    resource.prlimit(daemon.pid, resource.RLIMIT_AS, (now + 8 * MIB, now + 8 * MIB))
    with pytest.raises(WorkerError) as refused:
        worker.register("c", 16 * MIB, seed=1)  # of the same bytes it would share the host copy
    assert refused.value.kind in ("OutOfMemory", "LimitReached")
    worker.use("b")
    late.ping()
    worker.unregister("b")
    serves(daemon, late, "d")
