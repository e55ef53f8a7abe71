"""Guarantee 5: a faulty worker can delay others while it holds leases, and nothing more.

Each test does one wrong thing, and checks its effect on a correct worker.
"""

import mmap
import os
import random
import signal
import socket
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from swapd.shared import protocol
from swapd.shared.config import Config
from tests.guarantees.harness import (
    MIB,
    Daemon,
    RawSession,
    Worker,
    WorkerError,
    World,
    await_exit,
    descriptors,
    is_alive,
)

NOBODY = 65534


def assert_unharmed(daemon: Daemon, worker: Worker) -> None:
    """A correct worker can get the whole budget, with the right bytes."""
    name = f"all{len(daemon.watch.seen('Register'))}"
    expected = worker.register(name, 16 * MIB, seed=16)
    assert worker.use(name)[1] == expected
    worker.unregister(name)
    status = daemon.status()
    assert status.waiting == 0
    assert status.used_bytes == sum(c.nbytes for c in status.components if c.state == "idle")


def assert_none_more(daemon: Daemon, before: dict[int, list[str]]) -> None:
    """No process has more descriptors open than `before`.

    The other side closes its end of a closed connection a moment later, without a message: so this
    looks again for a while. The few that were closing in `before` hide no leak, as the tests would
    leak many.
    """
    for _ in range(5000):
        now = {pid: descriptors(pid) for pid in before}
        if all(len(now[pid]) <= len(before[pid]) for pid in before):
            return
        daemon.status()
    assert now == before


# --- SIGKILL -----------------------------------------------------------------------------


def test_killed_while_it_waits(world: World) -> None:
    daemon = world.daemon()
    victim, other = world.workers(daemon, "victim", "other")
    other.register("b", 16 * MIB)
    victim.register("a", 8 * MIB)
    other.acquire("b")
    victim.start("acquire", "a")
    daemon.await_record("Waiting", names=("a",))
    victim.kill()
    daemon.await_gone(victim)
    assert daemon.status().waiting == 0
    other.release("b")
    assert_unharmed(daemon, other)
    assert not [c for c in daemon.watch.seen("CopyIn") if c.name == "a"]


def test_killed_while_it_registers(world: World) -> None:
    daemon = world.daemon()
    victim, other = world.workers(daemon, "victim", "other")
    victim.start("stall_in_register", "a", 8 * MIB)
    assert victim.await_event() == "half filled"
    victim.kill()
    daemon.await_record("DropHostCopy", name="a")
    a = other.register("a", 4 * MIB, seed=1)
    assert other.use("a")[1] == a
    assert daemon.status().host_copy_bytes == 4 * MIB
    assert_unharmed(daemon, other)


def test_killed_while_its_component_is_copied_in(world: World) -> None:
    daemon = world.daemon(bandwidth="40MB/s")
    victim, other = world.workers(daemon, "victim", "other")
    victim.register("a", 12 * MIB)
    victim.start("acquire", "a")
    copy = daemon.await_record("CopyIn", name="a")
    victim.kill()
    daemon.await_gone(victim)
    b = other.register("b", 16 * MIB, seed=2)
    assert other.use("b")[1] == b
    daemon.await_record("CopyStopped", generation=copy.generation)
    daemon.await_record("DropHostCopy", name="a")
    daemon.await_record("CopyIn", name="b")  # not before: the copy in flight had the chunks


def test_killed_while_its_component_is_written_back(world: World) -> None:
    daemon = world.daemon(bandwidth="12MB/s", budget="8MiB")
    victim, other = world.workers(daemon, "victim", "other")
    victim.register("m", 8 * MIB, mutable=True)
    b = other.register("b", 4 * MIB, seed=2)
    victim.use("m")
    waiting = other.start("acquire", "b")
    daemon.await_record("CopyOut", name="m")
    victim.kill()
    daemon.await_record("Lost", name="m")
    waiting.result()
    assert other.look("b")[1] == b


@pytest.mark.parametrize("mutable", [False, True], ids=["clean", "mutable"])
def test_killed_while_it_holds(world: World, mutable: bool) -> None:
    daemon = world.daemon()
    victim, other = world.workers(daemon, "victim", "other")
    victim.register("a", 8 * MIB, mutable=mutable)
    b = other.register("b", 16 * MIB, seed=2)
    victim.acquire("a")
    waiting = other.start("acquire", "b")
    daemon.await_record("Waiting", names=("b",))
    victim.kill()
    waiting.result()
    assert other.look("b")[1] == b
    other.release("b")
    assert_unharmed(daemon, other)


def test_killed_while_it_releases(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    other.ping()
    for i in range(4):
        victim = world.worker(daemon, f"victim{i}")
        victim.register("a", 8 * MIB)
        victim.start("swap", "a", 1 << 30)
        for _ in range(10 + 7 * i):
            daemon.await_record("Release")
        victim.kill()
        daemon.await_record("DropHostCopy", name="a")
    assert_unharmed(daemon, other)


def test_those_who_wait_for_a_dead_workers_component_hear_whose_it_was(world: World) -> None:
    daemon = world.daemon()
    victim, other = world.workers(daemon, "victim", "other")
    victim.register("a", 8 * MIB)
    other.register("b", 16 * MIB)
    other.acquire("b")
    waiting = other.start("acquire", "a", lane="second")
    daemon.await_record("Waiting", names=("a",))
    victim.kill()
    with pytest.raises(WorkerError, match="went with victim") as refused:
        waiting.result()
    assert refused.value.kind == "UnknownComponent"
    other.release("b")
    assert_unharmed(daemon, other)


def test_a_lease_on_a_dead_workers_component_ends_without_harm(world: World) -> None:
    daemon = world.daemon()
    victim, other = world.workers(daemon, "victim", "other")
    victim.register("a", 8 * MIB)
    b = other.register("b", 8 * MIB, seed=2)
    other.acquire("a", "b", lease="both")
    victim.kill()
    daemon.await_record("DropHostCopy", name="a")
    assert other.look("b")[1] == b
    other.release("both")
    assert_unharmed(daemon, other)


# --- SIGSTOP -----------------------------------------------------------------------------


def test_a_stopped_holder_costs_what_it_leases_and_goes_on_where_it_was(world: World) -> None:
    daemon = world.daemon(ack_timeout=0.2)
    holder, other = world.workers(daemon, "holder", "other")
    a = holder.register("a", 8 * MIB, seed=1)
    b = other.register("b", 8 * MIB, seed=2)
    other.register("c", 12 * MIB, seed=3)
    holder.acquire("a")
    holder.stop()
    assert other.use("b")[1] == b
    with pytest.raises(WorkerError, match=r"held: a \(8 MiB\) by holder") as refused:
        other.acquire("c", timeout=0.3)
    assert refused.value.kind == "Timeout"
    holder.go_on()
    assert holder.look("a")[1] == a
    holder.release("a")
    other.use("c")
    assert holder.use("a")[1] == a


def test_a_stopped_worker_with_nothing_mapped_costs_nothing(world: World) -> None:
    daemon = world.daemon(ack_timeout=60)
    idle, other = world.workers(daemon, "idle", "other")
    a = idle.register("a", 8 * MIB, seed=1)
    idle.prefetch("a")
    daemon.await_record("CopiedIn")
    idle.stop()
    assert_unharmed(daemon, other)
    assert "a" not in {revoke.name for revoke in daemon.watch.seen("SendRevoke")}
    idle.go_on()
    assert idle.use("a")[1] == a


def test_relaxed_a_stopped_worker_that_holds_nothing_costs_nothing(world: World) -> None:
    daemon = world.daemon(isolation="relaxed", ack_timeout=60)
    idle, other = world.workers(daemon, "idle", "other")
    a = idle.register("a", 8 * MIB, seed=1)
    idle.use("a")
    idle.stop()
    assert_unharmed(daemon, other)
    assert [revoke.ack for revoke in daemon.watch.seen("SendRevoke") if revoke.name == "a"] == [
        False
    ]
    idle.go_on()
    assert idle.use("a")[1] == a


def test_strict_a_stopped_worker_costs_the_acknowledgements_deadline(world: World) -> None:
    daemon = world.daemon(ack_timeout=0.2)
    idle, other = world.workers(daemon, "idle", "other")
    idle.register("a", 8 * MIB)
    idle.use("a")
    idle.stop()
    assert_unharmed(daemon, other)
    why = daemon.watch.seen("Fence")[0].why
    assert "no acknowledgement within 0.2 s that 'a' is unmapped" in why
    assert "swapd serve --ack-timeout 60" in why
    assert "--ack-timeout 60" in daemon.log

    idle.go_on()
    told = idle.await_end()
    assert "SessionFenced: " in told
    assert why in told
    with pytest.raises(WorkerError, match="SessionFenced"):
        idle.acquire("a")
    idle.disconnect()
    idle.register_again("a")
    idle.use("a")


def test_strict_a_worker_that_keeps_the_gil_for_seconds_is_not_fenced_by_default(
    world: World,
) -> None:
    daemon = world.daemon(ack_timeout=Config().ack_timeout)
    busy, other = world.workers(daemon, "busy", "other")
    a = busy.register("a", 8 * MIB, seed=1)
    other.register("b", 16 * MIB)
    busy.use("a")
    compiling = busy.start("keep_the_gil", 5.0)
    assert busy.await_event() == "keeps the GIL"
    other.use("b")
    compiling.result()
    assert busy.error() == ""
    assert busy.use("a")[1] == a
    assert not daemon.watch.seen("Fence")


def test_a_worker_that_was_fenced_in_a_lease_computes_on_the_right_bytes(world: World) -> None:
    """Others have its chunks by then."""
    daemon = world.daemon(ack_timeout=0.2)
    holder, other = world.workers(daemon, "holder", "other")
    a = holder.register("a", 8 * MIB, seed=1)
    holder.register("b", 4 * MIB)
    other.register("c", 8 * MIB)
    holder.use("b")
    holder.acquire("a")
    before = holder.look("a")
    holder.stop()
    other.use("c")
    assert_unharmed(daemon, other)
    holder.go_on()
    assert "SessionFenced" in holder.await_end()
    assert holder.look("a") == before == [before[0], a]
    with pytest.raises(WorkerError) as told:
        holder.release("a")
    assert told.value.kind == "SessionFenced"  # its results from that time are in doubt
    holder.disconnect()
    assert holder.look("a") == before


def test_what_a_stopped_worker_may_still_write_to_is_kept_until_its_process_ends(
    world: World,
) -> None:
    daemon = world.daemon(ack_timeout=0.2)
    idle, other = world.workers(daemon, "idle", "other")
    idle.register("m", 8 * MIB, mutable=True)
    b = other.register("b", 8 * MIB, seed=2)
    other.register("c", 16 * MIB, seed=3)
    idle.use("m")
    idle.stop()
    with pytest.raises(WorkerError, match="beside 8 MiB that never leave"):
        other.acquire("c")
    assert daemon.status().quarantined_bytes == 8 * MIB
    assert other.use("b")[1] == b

    idle.kill()
    daemon.await_record("ProcessExited")
    assert daemon.status().quarantined_bytes == 0
    other.use("c")


# --- garbage -----------------------------------------------------------------------------


def frames(seed: int, valid: list[bytes]) -> list[bytes]:
    """Random bytes; valid messages, truncated or with bytes changed; and nesting."""
    rng = random.Random(seed)
    made = [rng.randbytes(rng.randrange(1, 200)) for _ in range(60)]
    for message in valid:
        made += [message[:n] for n in range(1, len(message))]
        for _ in range(20):
            changed = bytearray(message)
            changed[rng.randrange(len(changed))] = rng.randrange(256)
            made.append(bytes(changed))
    made += [b"\x81\xa2op" + rng.choice([b"\x91", b"\x81\xa1a"]) * 5000, b"\x91" * 10_000]
    made += [b"\x81\xa2id\xa1\xff", b"\xc1", b"\x81\xa1\xff\x00"]
    rng.shuffle(made)
    return made


REQUESTS: list[protocol.AnyRequest] = [
    protocol.Acquire(1 << 40, ("a", "b"), 3, 0.0),
    protocol.Register(1 << 41, "x", 8, "layout"),
    protocol.Commit(1 << 42, "x"),
    protocol.Release(1 << 43, 7, True),
    protocol.Cancel(1 << 44, 9),
    protocol.Prefetch(1 << 45, ("a",)),
    protocol.Unregister(1 << 46, "x"),
    protocol.ForecastRequest(1 << 47, ("a", "b")),
]


@pytest.mark.parametrize("seed", range(2))
def test_garbage_on_rpc_is_answered_and_costs_nothing(world: World, seed: int) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    a = other.register("a", 8 * MIB, seed=1)
    other.acquire("a")
    with RawSession(daemon.folder) as raw:
        for frame in frames(seed, [protocol.encode(r) for r in REQUESTS]):
            raw.rpc.send(frame)
        for parts in ([b""], [b"", b""], [b"x", b"y", b"z"], [protocol.encode(REQUESTS[0])] * 2):
            raw.rpc.send_multipart(parts)
        raw.rpc.send(protocol.encode(protocol.StatusRequest(1 << 50)))
        answers = [raw.answer()]
        while not isinstance(answers[-1], protocol.Status):
            answers.append(raw.answer())
        refused = [a for a in answers if isinstance(a, protocol.Refused)]
        assert len([a for a in refused if a.code == "bad_request"]) > 100
    assert other.look("a")[1] == a
    other.release("a")
    assert_unharmed(daemon, other)


@pytest.mark.parametrize("seed", range(2))
def test_garbage_on_the_lifeline_ends_that_session_alone(world: World, seed: int) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    a = other.register("a", 8 * MIB, seed=1)
    other.acquire("a")
    valid = [protocol.encode(protocol.Hello(1, "x")), protocol.encode(protocol.Revoked("a", 1))]
    for i, frame in enumerate(frames(seed, valid)[:120]):
        with RawSession(daemon.folder, hello=bool(i % 2), rpc=False) as raw:
            raw.lifeline.send(frame)
            with suppress(BrokenPipeError):  # the frame may have ended the session
                raw.lifeline.send(b"\xc1")  # invalid after any frame
            last = raw.end()[-1]
            assert isinstance(last, protocol.Goodbye)
            assert last.code in ("bad_request", "version")
    assert other.look("a")[1] == a
    other.release("a")
    assert_unharmed(daemon, other)
    assert len(daemon.status().sessions) == 2


def test_bytes_that_are_no_zeromq_on_rpc(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    rng = random.Random(1)
    for _ in range(30):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(str(daemon.folder / "rpc.sock"))
            stranger.send(rng.randbytes(300))
            while stranger.recv(1024):
                """Its greeting, and then the end."""
    assert_unharmed(daemon, other)


HUGE = (1 << 64) - 1
LONG = "x" * 10_000


def test_absurd_requests_are_refused(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    a = other.register("a", MIB, seed=1, part_of="f")
    absurd: list[Any] = [
        *({"op": "register", "part_of": name} for name in (LONG, "a\nb", "new", "workspace 1.1")),
        {"op": "register", "part_of": "g", "nbytes": HUGE},
        {"op": "register", "content": LONG},
        {"op": "register", "content": "c", "layout": LONG},
        {"op": "register", "content": "c", "mutable": True},
        {"op": "register", "content": "c", "nbytes": 1 << 49},
        {"op": "register", "transient": True},
        {"op": "register", "part_of": "g", "transient": 2},
        *({"op": "update", "name": name} for name in ("", LONG, "f", "a", "workspace 1.1")),
        *({"op": "commit", "name": "a", "also": names} for names in (["no"], [""], ["x"] * 2000)),
        {"op": "give_up", "name": ""},
        {"op": "give_up", "update": "1"},
        {"op": "resize", "name": "a"},
        *({"op": "resize", "name": "f", "resident_bytes": n} for n in (-1, HUGE, 0.5)),
        *({"op": "forecast", "names": n} for n in ([], ["x"] * 2000, ["f", "workspace 1.1"])),
        {"op": "prefetch", "names": ["f", ""]},
    ]
    with RawSession(daemon.folder) as raw:
        for what in absurd:
            given = {"name": "new", "nbytes": 10, "update": HUGE, "names": ["f"], **what}
            raw.rpc.send(msgspec.msgpack.encode({"id": raw.next_id(), **given}))
            refused = raw.answer()
            assert isinstance(refused, protocol.Refused), what
            assert len(refused.message) < 1000, what
        assert other.use("a")[1] == a
    assert_unharmed(daemon, other)


def test_descriptors_that_nobody_asked_for_are_closed(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    assert_unharmed(daemon, other)
    before = {daemon.pid: descriptors(daemon.pid)}
    packets = [(protocol.encode(protocol.Revoked("a", 1)), 30)] * 20 + [(b"\xc1", 200)]
    for packet, count in packets:  # each ends its session
        with RawSession(daemon.folder, rpc=False) as raw:
            socket.send_fds(raw.lifeline, [packet], [0] * count)
            last = raw.end()[-1]
            assert isinstance(last, protocol.Goodbye)
            assert last.code == "bad_request"
    assert_unharmed(daemon, other)
    assert_none_more(daemon, before)


# --- one channel without the other -------------------------------------------------------


def test_lifelines_without_rpc_cost_nothing(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    silent = [RawSession(daemon.folder, rpc=False, hello=i % 2 == 0) for i in range(60)]
    assert_unharmed(daemon, other)
    assert len(daemon.status().sessions) == 2 + 30
    for raw in silent:
        raw.__exit__()
    for raw in silent[::2]:
        daemon.await_gone(raw)
    assert len(daemon.status().sessions) == 2


def test_rpc_without_a_lifeline_is_refused(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    other.register("a", 8 * MIB)
    with RawSession(daemon.folder) as raw:
        for identity in (b"x", b"y" * 16, b"z" * 20, raw.token[:15], raw.token[::-1]):
            rpc = raw.dealer(daemon.folder, identity)
            for request in (protocol.StatusRequest(5), *REQUESTS):
                rpc.send(protocol.encode(request))
                refused = protocol.decode_reply(rpc.recv())
                assert isinstance(refused, protocol.Refused)
                assert (refused.code, refused.id) == ("no_session", request.id)
                assert "belongs to no open lifeline" in refused.message

        raw.acquire("a")
        raw.lifeline.close()
        daemon.await_gone(raw)
        late = raw.ask(protocol.StatusRequest(raw.next_id()))
        assert isinstance(late, protocol.Refused)
        assert late.code == "no_session"
    assert_unharmed(daemon, other)


@pytest.mark.parametrize("version", [2, protocol.VERSION + 1])
def test_a_client_of_another_version_is_told_so(world: World, version: int) -> None:
    daemon = world.daemon()
    with RawSession(daemon.folder, hello=False, rpc=False) as raw:
        raw.tell(protocol.Hello(version, "other"))
        (said,) = raw.end()
        assert isinstance(said, protocol.Goodbye)
        assert said.code == "version"
        assert "install the same version" in said.message


# --- false messages ----------------------------------------------------------------------


def test_stale_and_foreign_acknowledgements_are_ignored(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    other.register("b", 16 * MIB)
    with RawSession(daemon.folder) as raw, RawSession(daemon.folder) as liar:
        raw.register("a", 8 * MIB)
        generations = []
        for _ in range(2):
            granted = raw.acquire("a")
            generations.append(granted.placements[0].generation)
            raw.release(granted)
            waiting = other.start("acquire", "b")
            revoke = raw.hear()
            while isinstance(revoke, protocol.Wanted):
                revoke = raw.hear()
            assert revoke == protocol.Revoke("a", generations[-1], ack=True)
            for teller, name, generation in (
                *((raw, "a", old) for old in generations[:-1]),
                (raw, "a", generations[-1] + 1),
                (raw, "b", 0),
                (raw, "nothing", -1),
                (liar, "a", generations[-1]),
            ):
                teller.tell(protocol.Revoked(name, generation))
                daemon.await_record("RevokeAck", generation=generation)
            assert daemon.component("a").state == "revoking"
            assert not waiting.done
            raw.tell(protocol.Revoked("a", generations[-1]))
            waiting.result()
            raw.tell(protocol.Revoked("a", generations[-1]))  # a second time
            other.release("b")
    assert_unharmed(daemon, other)


def test_replayed_requests_change_nothing(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    b = other.register("b", 8 * MIB, seed=2)
    with RawSession(daemon.folder) as raw, RawSession(daemon.folder) as liar:
        raw.register("a", 8 * MIB)
        granted = raw.acquire("a")
        again = raw.ask(protocol.Acquire(granted.id, ("a",)))
        assert isinstance(again, protocol.Refused)
        assert again.code == "bad_request"
        assert "in use already" in again.message
        assert daemon.component("a").leases == 1

        for request in (protocol.Release(1, granted.id, ack=True), protocol.Release(2, 99, True)):
            assert isinstance(liar.ask(request), protocol.Done)
        liar.rpc.send(protocol.encode(protocol.Cancel(3, granted.id)))
        stolen = liar.ask(protocol.Unregister(4, "a"))
        assert isinstance(stolen, protocol.Refused)
        assert stolen.code == "not_owner"
        assert daemon.component("a").leases == 1

        raw.release(granted)
        second = raw.acquire("a")
        raw.release(granted)
        assert daemon.component("a").leases == 1, "a stale release took another's lease"
        raw.release(second)
        done_twice = raw.ask(protocol.Commit(raw.next_id(), "a"))
        assert isinstance(done_twice, protocol.Refused)
    assert other.use("b")[1] == b
    assert_unharmed(daemon, other)


def test_a_master_that_is_still_mapped_for_writing_is_refused(world: World) -> None:
    """Otherwise its worker could change a clean component unnoticed."""
    daemon = world.daemon()
    with RawSession(daemon.folder) as raw:
        raw.ask(protocol.Register(1, "a", 4 * MIB))
        assert isinstance(raw.hear(), protocol.Master)
        with mmap.mmap(raw.fds[-1].fileno(), 4 * MIB):
            refused = raw.ask(protocol.Commit(2, "a"))
        assert isinstance(refused, protocol.Refused)
        assert "still mapped for writing" in refused.message
        raw.register("a", 4 * MIB)
        with pytest.raises(PermissionError):
            mmap.mmap(raw.fds[-1].fileno(), 4 * MIB)


# --- system resources --------------------------------------------------------------------


def test_the_same_content_under_two_names_and_the_first_unregistered(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    with RawSession(daemon.folder) as raw:
        for name in ("a", "b"):
            asked = protocol.Register(raw.next_id(), name, MIB, content="the same")
            assert isinstance(raw.ask(asked), protocol.Done)
        assert isinstance(raw.ask(protocol.Unregister(raw.next_id(), "a")), protocol.Done)
        assert isinstance(raw.ask(protocol.Commit(raw.next_id(), "b")), protocol.Done)
    assert_unharmed(daemon, other)


def test_a_full_disk_under_the_swap_log_costs_records_of_the_file_only(world: World) -> None:
    log = world.folder / "log.jsonl"
    log.symlink_to("/dev/full")
    daemon = world.daemon(swap_log=log)
    worker, other = world.workers(daemon, "worker", "other")
    a = worker.register("a", 8 * MIB, seed=1)
    other.register("b", 16 * MIB)
    for _ in range(3):
        assert worker.use("a")[1] == a
        other.use("b")
    published = daemon.watch.seen("Evicted")
    assert len(published) >= 4
    assert "swap log" in daemon.log
    assert str(log) in daemon.log

    log.unlink()  # there is room again
    worker.use("a")
    assert_unharmed(daemon, other)
    daemon.terminate()
    daemon.wait()
    records = [daemon.watch.parse(line) for line in log.read_bytes().splitlines()]
    assert records[0].dropped > 10
    assert not any(record.dropped for record in records[1:])
    assert [r.seq for r in records[1:]] == list(range(records[0].seq, records[-1].seq + 1))


def test_sockets_that_a_dead_daemon_left_are_no_obstacle(world: World) -> None:
    daemon = world.daemon()
    daemon.kill()
    assert (daemon.folder / "lifeline.sock").exists()
    late = world.worker(daemon, "late")
    with pytest.raises(WorkerError, match="Start one: swapd serve") as refused:
        late.ping()
    assert refused.value.kind == "NotRunning"
    again = world.daemon()
    assert again.folder == daemon.folder
    assert_unharmed(again, late)


def test_a_second_daemon_on_the_same_device_is_refused(world: World) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    a = worker.register("a", 8 * MIB, seed=1)
    worker.acquire("a")
    second = world.daemon()
    assert second.wait() == 1
    assert f"another swapd (process {daemon.pid}) serves this device" in second.log
    assert "use another --device or --runtime-dir" in second.log
    assert worker.look("a")[1] == a
    worker.release("a")
    assert_unharmed(daemon, worker)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_process_cannot_reach_the_sockets(world: World) -> None:
    daemon = world.daemon()
    stranger, other = world.workers(daemon, "stranger", "other")
    world.folder.chmod(0o755)
    assert daemon.folder.stat().st_mode & 0o777 == 0o700
    assert [f.stat().st_mode & 0o777 for f in daemon.folder.glob("*.sock")] == [0o600] * 3
    stranger.become(NOBODY)
    with pytest.raises(WorkerError, match="another user") as refused:
        stranger.ping()
    assert refused.value.kind == "NotRunning"
    assert_unharmed(daemon, other)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_process_is_refused_by_its_credentials(world: World) -> None:
    """Even in a folder with open permissions."""
    daemon = world.daemon()
    stranger, other = world.workers(daemon, "stranger", "other")
    for path in (world.folder, daemon.folder):
        path.chmod(0o755)
    for path in daemon.folder.glob("*.sock"):
        path.chmod(0o777)
    stranger.become(NOBODY)
    assert stranger.knock() == "this daemon serves another user"
    while f"refused process {stranger.pid} of user {NOBODY}" not in daemon.log:
        pass  # the daemon logs it after the answer
    with pytest.raises(WorkerError, match="user 0") as refused:
        stranger.ping()  # nor would its client have trusted this daemon with weights
    assert refused.value.kind == "NotRunning"
    assert_unharmed(daemon, other)


# --- effects over time -------------------------------------------------------------------


def test_a_forked_child_cannot_use_the_client_nor_hide_its_parents_death(world: World) -> None:
    daemon = world.daemon()
    parent, other = world.workers(daemon, "parent", "other")
    a = parent.register("a", 8 * MIB, seed=1)
    parent.acquire("a")
    forked = parent.fork("a")
    try:
        verbs = ("acquire", "release", "status", "register", "unregister")
        assert forked["errors"] == dict.fromkeys(verbs, "ClientClosed")
        assert parent.look("a")[1] == a
        assert parent.fork_and_close() == 0
        assert parent.look("a")[1] == a
        parent.release("a")
        assert parent.use("a")[1] == a

        parent.acquire("a")
        parent.kill()
        daemon.await_gone(parent)
        assert is_alive(forked["child"])
        assert_unharmed(daemon, other)
    finally:
        os.kill(forked["child"], signal.SIGKILL)
        await_exit(forked["child"])


def test_a_hundred_swaps_leave_no_descriptor_behind(world: World) -> None:
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    worker.register("a", 8 * MIB)
    worker.register("m", 4 * MIB, mutable=True)
    other.register("b", 16 * MIB)

    def swap() -> None:
        other.swap("b", 1)
        worker.swap("a", 1)
        worker.swap("m", 1)

    swap()
    daemon.status()
    before = {pid: descriptors(pid) for pid in (daemon.pid, worker.pid, other.pid)}
    for _ in range(50):
        swap()
    assert daemon.status().evictions >= 100
    assert_none_more(daemon, before)


def test_sessions_and_components_leave_no_descriptor_behind(world: World) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    worker.register("a", 2 * MIB)
    worker.use("a")
    worker.disconnect()
    daemon.await_record("DropHostCopy", name="a")
    daemon.status()
    before = {pid: descriptors(pid) for pid in (daemon.pid, worker.pid)}
    for mutable in [False, True] * 5:
        worker.register("a", 2 * MIB, mutable=mutable)
        worker.use("a")
        worker.disconnect()
        daemon.await_record("DropHostCopy", name="a")
    assert_none_more(daemon, before)
