"""Guarantee 5: a session that has much, or does much, costs the others no more than a turn."""

import os
import signal

from swapd.daemon.sessions import END_STEP
from swapd.daemon.statuses import STATUS_STEP
from swapd.shared import protocol
from tests.guarantees.harness import MIB, RawSession, World, stop_process

#: Enough for several steps of an end, and several turns of a status.
MANY = 2 * STATUS_STEP + 50


def register(session: RawSession, name: str, nbytes: int, content: str = "") -> None:
    """Ask for a host copy, and do not wait for it."""
    request = protocol.Register(session.next_id(), name, nbytes, content=content)
    session.rpc.send(protocol.encode(request))


def test_a_small_register_does_not_wait_until_a_large_master_is_made(world: World) -> None:
    daemon = world.daemon(budget="512MiB")
    with RawSession(daemon.folder) as greedy, RawSession(daemon.folder) as honest:
        honest.register("first", 4096)  # both connections exist, and are warm
        register(greedy, "large", 512 * MIB)
        daemon.await_record("MakeHostCopy", name="large")
        register(honest, "small", 4096)
        small = daemon.await_record("MakeHostCopy", name="small")
        assert isinstance(honest.answer(), protocol.Done)
        assert isinstance(greedy.answer(), protocol.Done)
        made = [one.uid for one in daemon.watch.seen("HostCopyMade")]
        (large,) = (m for m in daemon.watch.seen("MakeHostCopy") if m.name == "large")
        assert made.index(small.uid) < made.index(large.uid)


def test_what_a_dropped_master_leaves_is_had_by_who_registers_next(world: World) -> None:
    """The drop runs in the background, and yet it causes no refusal."""
    daemon = world.daemon(budget="64MiB", host_memory="64MiB")
    with RawSession(daemon.folder) as session:
        for i in range(5):
            session.register(f"a{i}", 48 * MIB)
            said = session.ask(protocol.Unregister(session.next_id(), f"a{i}"))
            assert isinstance(said, protocol.Done)


def test_a_session_with_much_ends_in_steps_and_a_status_names_all_of_it(world: World) -> None:
    daemon = world.daemon()
    with RawSession(daemon.folder) as honest:
        honest.register("own", 4096)
        with RawSession(daemon.folder) as much:
            for i in range(MANY):
                much.register(f"c{i}", 64)
            names = {c.name for c in daemon.status().components}
            assert names == {"own", *(f"c{i}" for i in range(MANY))}
            session = much.session
        daemon.await_record("SessionGone", session=session)
        assert len(daemon.watch.seen("SessionEnds")) >= MANY // END_STEP - 1
        assert [c.name for c in daemon.status().components] == ["own"]
        honest.release(honest.acquire("own"))


def test_a_host_copy_that_a_session_shares_while_it_ends_in_steps_is_shared_on(
    world: World,
) -> None:
    """The original is unregistered before the end reaches its copy; others share the copy then."""
    daemon = world.daemon()
    with RawSession(daemon.folder) as first, RawSession(daemon.folder) as last:
        last.register("own", 4096)  # both connections exist, and are warm
        register(first, "original", 4096, content="x")
        assert isinstance(first.answer(), protocol.Done)
        with RawSession(daemon.folder) as much:
            for i in range(4 * MANY):
                much.register(f"c{i}", 64)
            register(much, "shared", 4096, content="x")
            daemon.await_record("Register", name="shared")
            stop_process(daemon.pid)  # so that the seal comes after the begin of the end
        first.rpc.send(protocol.encode(protocol.Commit(first.next_id(), "original")))
        os.kill(daemon.pid, signal.SIGCONT)
        assert isinstance(first.answer(), protocol.Done)
        said = first.ask(protocol.Unregister(first.next_id(), "original"))
        assert isinstance(said, protocol.Done)
        register(last, "shared on", 4096, content="x")
        assert isinstance(last.answer(), protocol.Done)
        daemon.await_gone(much)
        last.release(last.acquire("own"))
