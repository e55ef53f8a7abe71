"""Guarantee 5, of holders that do not read: they lose nothing until others need their memory.

A worker that is stopped, or holds the GIL for minutes, reads no messages about other sessions. Such
messages carry state: when it reads again, it gets the latest one.
"""

from swapd.daemon import lifeline
from swapd.shared import protocol
from tests.guarantees.harness import MIB, Daemon, Pending, RawSession, Worker, World

#: More than a socket takes and the daemon ever kept; each round sends two messages.
ROUNDS = 1500


def contend(daemon: Daemon, holder: Worker, waiter: Worker, rounds: int) -> Pending:
    """Have `waiter` wait for the memory of `holder`, and give up, again and again.

    It waits when this returns.
    """
    session = holder.ping()
    told = waiter.start("give_up_until_granted", "c", lane="contending")
    for _ in range(rounds):
        daemon.await_record("SendHurry", session=session, waits=True)
    return told


def test_a_holder_whose_memory_nobody_wants_goes_on_however_late_it_reads(world: World) -> None:
    daemon = world.daemon(ack_timeout=0.2)
    deaf, holder, waiter = world.workers(daemon, "deaf", "holder", "waiter")
    a = deaf.register("a", 2 * MIB, seed=1)
    b = holder.register("b", 8 * MIB, seed=2)
    waiter.register("c", 12 * MIB)
    deaf.acquire("a")
    before = deaf.look("a")
    holder.acquire("b")
    deaf.stop()
    waiting = contend(daemon, holder, waiter, ROUNDS)
    holder.release("b")
    assert waiting.result() > 250
    assert holder.use("b")[1] == b
    deaf.go_on()
    assert deaf.look("a") == before == [before[0], a]
    deaf.release("a")
    assert deaf.error() == ""
    assert deaf.use("a")[1] == a
    assert not [want for want in daemon.watch.seen("SendWanted") if want.name == "a"]
    assert not daemon.watch.seen("Fence")
    assert "does not read" not in daemon.log


def test_a_holder_that_did_not_read_hears_what_is_true_by_then(world: World) -> None:
    daemon = world.daemon()
    deaf, other = world.workers(daemon, "deaf", "other")
    deaf.register("a", 8 * MIB)
    other.register("c", 16 * MIB)
    deaf.acquire("a")
    session = deaf.ping()
    deaf.stop()
    waiting = other.start("give_up_until_granted", "c")
    for _ in range(ROUNDS):
        daemon.await_record("SendWanted", session=session, wanted=True)
    deaf.go_on()
    deaf.work_until_wanted("a")
    waiting.result()
    assert deaf.error() == ""


def test_who_is_fenced_in_the_midst_of_contention_hears_why(world: World) -> None:
    """Its socket has room for the reason, after any number of messages about others."""
    daemon = world.daemon(ack_timeout=1)
    deaf, holder, waiter = world.workers(daemon, "deaf", "holder", "waiter")
    deaf.register("a", 4 * MIB)
    deaf.register("idle", 2 * MIB)
    holder.register("b", 4 * MIB)
    waiter.register("c", 12 * MIB)
    deaf.use("idle")
    deaf.acquire("a")
    holder.acquire("b")
    deaf.stop()
    waiting = contend(daemon, holder, waiter, 400)
    holder.register("d", 8 * MIB)
    holder.use("d")  # it fits beside the held ones, in the place of "idle"
    deaf.go_on()
    assert "--ack-timeout" in deaf.await_end()
    holder.release("b")
    waiting.result()


def test_a_session_that_takes_nothing_is_refused_more_and_not_ended(world: World) -> None:
    daemon = world.daemon(budget="2MiB")
    worker = world.worker(daemon, "worker")
    a = worker.register("a", MIB, seed=1)
    with RawSession(daemon.folder) as raw:
        refused = None
        made = 0
        while refused is None:
            said = raw.ask(protocol.Register(raw.next_id(), f"x{made}", 0))
            if isinstance(said, protocol.Refused):
                refused = said
            else:
                made += 1
        assert made >= lifeline.UNREAD_MAX
        assert "does not read" in refused.message, refused
        assert worker.use("a")[1] == a
        kept = {"session": raw.session, "channel": "lifeline"}
        assert daemon.await_record("Unread", **kept).count, "since then its time runs"
        masters = [raw.hear() for _ in range(made)]
        daemon.await_record("Unread", **kept, count=0)
        assert [m.name for m in masters if isinstance(m, protocol.Master)] == [
            f"x{i}" for i in range(made)
        ]
        raw.register("y", MIB)
