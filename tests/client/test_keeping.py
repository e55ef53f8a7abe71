"""A thread that comes back at once need not ask again; other releases reach the daemon at once."""

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import swapd_client
from swapd import spawn
from swapd.shared.protocol import Granted
from swapd.shared.system import Alarm
from swapd_client.errors import SessionFenced
from swapd_client.leases.agents import Agent
from swapd_client.leases.book import Record
from swapd_client.leases.keeper import Keeper
from swapd_client.leases.keeping import (
    BACK_S,
    LINGER_S,
    SWEEP_S,
    UNTOLD_S,
    End,
    LoopKeeping,
    WorkKeeping,
)
from swapd_client.session import processor
from swapd_client.session.told import Told
from tests.sleeping import more_sleeps, sleeps

KEY = (1, ("a",))
OTHER = (2, ("b",))


def lease(number: int = 7) -> Record:
    return Record(Granted(number, (), 0.5, True), ("a",), Agent(1, 1))


LEASE = lease()
SOON = LINGER_S / 2
NEVER_S = 3600.0


@pytest.fixture(autouse=True)
def anew() -> None:
    """Resets LEASE."""
    LEASE.again, LEASE.untold_since, LEASE.work, LEASE.transient = 0, None, None, False


def trained(now: float = 0.0, told: Told | None = None) -> LoopKeeping:
    """A keeping whose KEY was released and taken again at once, just before `now`."""
    linger = LoopKeeping(told or Told())
    assert not linger.keep(KEY, LEASE, now - SOON)
    assert linger.take(KEY, now) is None
    return linger


def test_nobody_is_trusted_before_they_came_back_at_once() -> None:
    linger = LoopKeeping(Told())
    assert linger.take(KEY, 0.0) is None
    assert not linger.keep(KEY, LEASE, 0.0)
    assert linger.take(KEY, 1.0) is None, "much later"
    assert not linger.keep(KEY, LEASE, 1.0)
    assert not linger


def test_who_came_back_at_once_gets_the_same_lease_again() -> None:
    linger = trained()
    for step in (0.1, 0.2, 0.3):
        assert linger.keep(KEY, LEASE, step)
        assert linger.take(KEY, step + SOON) is LEASE
    assert LEASE.again == 3


def test_a_loop_tells_the_daemon_now_and_then_all_the_same() -> None:
    linger = trained()
    assert linger.keep(KEY, LEASE, 1.0)
    assert linger.take(KEY, 1.0 + SOON) is LEASE
    assert not linger.keep(KEY, LEASE, 1.1 + UNTOLD_S)
    assert LEASE.again == 1
    assert linger.take(KEY, 1.1 + UNTOLD_S) is None
    assert linger.keep(KEY, lease(), 1.2 + UNTOLD_S), "still trusted, and a lease from anew"


def test_what_lingered_in_vain_is_due_and_trusted_no_more() -> None:
    linger = trained()
    assert linger.keep(KEY, LEASE, 1.0)
    assert linger.woken(1.0 + SOON) == []
    assert linger.woken(1.0 + 2 * LINGER_S) == [LEASE]
    assert not linger
    assert linger.take(KEY, 1.0 + 3 * LINGER_S) is None
    assert not linger.keep(KEY, LEASE, 2.0)


def test_a_second_lease_on_the_same_is_not_kept_beside_the_first() -> None:
    linger = trained()
    assert linger.keep(KEY, LEASE, 1.0)
    assert not linger.keep(KEY, lease(8), 1.0)


def test_only_the_agent_and_the_names_that_are_meant() -> None:
    told = Told()
    linger = trained(told=told)
    assert linger.keep(KEY, LEASE, 1.0)
    assert linger.take(OTHER, 1.0) is None
    assert linger.of(2) == []
    told.wanted = {"b"}
    assert linger.woken(1.0) == []
    told.wanted = {"a", "b"}
    assert linger.woken(1.0) == [LEASE]
    told.wanted = set()
    assert linger.keep(KEY, LEASE, 2.0)
    assert linger.of(1) == [LEASE]


def test_who_asks_for_something_else_in_between_is_not_trusted() -> None:
    linger = LoopKeeping(Told())
    for step in range(3):
        for names in (("a",), ("b",)):
            assert linger.take((1, names), step * SOON) is None
            assert linger.of(1) == [], "asks the daemon"
            assert not linger.keep((1, names), LEASE, step * SOON)


def test_one_loop_inside_another_is_trusted_with_both() -> None:
    linger, inner, seen = LoopKeeping(Told()), lease(8), list[bool]()
    for step in range(4):
        for names in (("a",), ("b",)):
            if linger.take((1, names), step * SOON) is None:
                linger.of(1)  # asks the daemon
        seen.append(linger.keep((1, ("b",)), inner, step * SOON))
        seen.append(linger.keep((1, ("a",)), LEASE, step * SOON))
    # the outer one is known when it comes back; then no request precedes the inner one
    assert seen == [False, False, False, True, True, True, True, True]


class Daemon:
    """Records the leases that end."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.wanted: set[str] = set()
        self.hurried = False
        self._came = threading.Semaphore(0)

    def give_back(self, record: Record) -> None:
        self.heard.append(record.id)
        self._came.release()

    def forget(self) -> None:
        self.heard.clear()
        self._came = threading.Semaphore(0)

    def await_one(self) -> None:
        self._came.acquire()


def nothing_late(work: processor.Work, end: End) -> None:
    """There is no GPU."""
    raise AssertionError


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def keeper(daemon: Daemon) -> Iterator[Keeper]:
    """A keeper whose KEY comes back at once."""
    with closing(Keeper(daemon, daemon.give_back, nothing_late)) as keeper:
        for _ in range(1000):  # on a busy machine a return may not be at once
            if keeper.keep(KEY, LEASE):
                break
            if keeper.take(KEY):
                break
        keeper.flush_all()
        daemon.forget()
        yield keeper


def keep(keeper: Keeper) -> None:
    while not keeper.keep(KEY, LEASE):
        LEASE.untold_since = None  # else it must tell the daemon at times
        keeper.take(KEY)


def test_it_is_given_back_when_nobody_comes_back(keeper: Keeper, daemon: Daemon) -> None:
    keep(keeper)
    daemon.await_one()
    assert daemon.heard[-1] == LEASE.granted.id


def test_it_is_given_back_when_somebody_waits_for_it(keeper: Keeper, daemon: Daemon) -> None:
    keep(keeper)
    daemon.wanted = {"a"}
    keeper.hurry()
    daemon.await_one()
    assert not keeper.keep(KEY, LEASE), "wanted: the daemon is to be told now"


def test_it_is_given_back_when_somebody_waits_for_anything(
    keeper: Keeper, daemon: Daemon, endless: None
) -> None:
    keep(keeper)
    daemon.hurried = True
    keeper.hurry()
    daemon.await_one()
    keep(keeper)
    daemon.await_one()


def test_it_is_given_back_soon_if_it_then_leaves_the_device(
    keeper: Keeper, daemon: Daemon, endless: None
) -> None:
    LEASE.transient = True
    while not keeper.keep(KEY, LEASE):
        keeper.take(KEY)
    daemon.await_one()


def test_what_is_kept_while_it_is_said_that_somebody_waits_does_not_stay(
    daemon: Daemon, endless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alarm is set to a later time just after it rang."""
    keeper = Keeper(daemon, daemon.give_back, nothing_late)
    set_alarm = Alarm.set

    def set_late(alarm: Alarm, after_s: float) -> None:
        if after_s >= NEVER_S:
            daemon.hurried = True
            keeper.hurry()
        set_alarm(alarm, after_s)

    monkeypatch.setattr(Alarm, "set", set_late)
    with closing(keeper):
        keep(keeper)
        daemon.await_one()


class Clock:
    """Replaces `time`: stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("swapd_client.leases.keeper.time", clock)
    return clock


@pytest.fixture
def alarms(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times of alarms, by that clock; they do not ring."""
    at: list[float] = []
    monkeypatch.setattr(Alarm, "set", lambda alarm, after_s: at.append(clock.now + after_s))
    return at


def test_a_loop_sets_the_alarm_later_now_and_then_and_is_never_woken(
    daemon: Daemon, clock: Clock, alarms: list[float]
) -> None:
    keeper = Keeper(daemon, daemon.give_back, nothing_late)
    keep(keeper)
    for step in range(1000):
        assert keeper.take(KEY)
        clock.now = step * SWEEP_S / 10
        keep(keeper)
        assert alarms[-1] > clock.now, "else it would have gone off"
    assert len(alarms) <= 1000 / 10 + 1


def test_a_loop_that_goes_on_does_not_keep_what_another_left(
    daemon: Daemon, clock: Clock, alarms: list[float]
) -> None:
    keeper = Keeper(daemon, daemon.give_back, nothing_late)
    while not keeper.keep(OTHER, LEASE):
        keeper.take(OTHER)
    keep(keeper)
    while clock.now < SWEEP_S:
        assert keeper.take(KEY)
        clock.now += SWEEP_S / 10
        keep(keeper)
    for _ in range(5):
        assert keeper.take(KEY)
        clock.now += SWEEP_S / 10
        keep(keeper)
    assert max(alarms) <= 2 * SWEEP_S


def test_another_process_gets_it_at_once_though_its_quantum_is_not_over(endless: None) -> None:
    with (
        spawn.daemon(budget="16MiB", residency_factor=1e6, residency_bound=1e6) as daemon,
        swapd_client.connect(daemon.folder) as looping,
        swapd_client.connect(daemon.folder) as other,
    ):
        looping.register("a", {"x": bytes(12 << 20)})
        other.register("b", {"x": bytes(12 << 20)})
        while (
            not looping._leasing.keeper
        ):  # a thread that comes back at once is trusted to do so again
            looping.acquire("a").release()
        assert other.status().components[0].holders
        with other.acquire("b"):
            assert not looping._leasing.keeper
        assert not looping.session.told.wanted


def test_it_is_given_back_before_its_agent_asks_for_more(keeper: Keeper, daemon: Daemon) -> None:
    keep(keeper)
    assert keeper.pop(OTHER[0]) == []
    assert keeper.pop(KEY[0]) == [LEASE]
    assert keeper.pop(KEY[0]) == []
    assert not daemon.heard


def test_closing_gives_back_what_is_kept(daemon: Daemon) -> None:
    keeper = Keeper(daemon, daemon.give_back, nothing_late)
    keep(keeper)
    keeper.close()
    keeper.close()
    assert daemon.heard[-1] == LEASE.granted.id
    assert not keeper.keep(KEY, LEASE)


def test_who_waits_is_told_of_while_it_closes(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper(daemon, daemon.give_back, nothing_late)
    ring = Alarm.ring

    def ring_late(alarm: Alarm) -> None:
        monkeypatch.setattr(Alarm, "ring", ring)
        keeper.close()
        ring(alarm)

    keep(keeper)
    monkeypatch.setattr(Alarm, "ring", ring_late)
    keeper.hurry()
    assert daemon.heard[-1] == LEASE.granted.id


def test_a_lease_that_ended_otherwise_ends_no_thread(daemon: Daemon) -> None:
    def refuse(record: Record) -> None:
        daemon.give_back(record)
        raise SessionFenced("the daemon has ended this session")

    with closing(Keeper(daemon, refuse, nothing_late)) as keeper:
        for _ in range(2):
            keep(keeper)
            daemon.await_one()
        keep(keeper)
    assert not keeper.keep(KEY, LEASE)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep of kept leases comes too late to happen in a test."""
    monkeypatch.setattr("swapd_client.leases.keeping.SWEEP_S", NEVER_S)


class Work:
    """GPU work that ends when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def is_pending(self) -> bool:
        return not self.done

    def is_over(self) -> bool:
        return self.done


def test_on_a_gpu_it_lingers_from_when_the_work_is_done() -> None:
    linger, work, busy = LoopKeeping(Told()), Work(), LEASE
    busy.work = work
    assert not linger.keep(KEY, busy, 0.0)
    assert linger.take(KEY, 0.05) is None, "but it came back while the GPU may be at it"
    assert linger.keep(KEY, busy, 1.0)
    assert linger.woken(1.0 + 5 * LINGER_S) == []
    work.done = True
    assert linger.woken(1.0 + 5.5 * LINGER_S) == [], "looked at a moment ago"
    assert linger.woken(1.0 + 7 * LINGER_S) == [busy]


def test_hits_wake_no_thread(endless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a loop over one component, nor over several in turn."""
    monkeypatch.setattr("swapd_client.leases.keeping.LINGER_S", NEVER_S)
    with (
        spawn.daemon(budget="16MiB") as daemon,
        swapd_client.connect(daemon.folder) as client,
    ):
        for name in "ab":
            client.register(name, {"x": bytes(1 << 20)})
        for names in ("a", "ab"):
            for step in range(52):
                if step == 2:
                    before = sleeps()
                for name in names:
                    client.acquire(name).release()
            assert not more_sleeps(before), names


# --- leases released while the GPU still works ---------------------------------------------


def nothing(here: object = None) -> None:
    """Ends no lease."""


def returning(told: Told | None = None) -> WorkKeeping:
    """A keeping whose thread 1 released and came back at once, at time 0."""
    keeping = WorkKeeping(told or Told())
    assert not keeping.keep(1, Work(), nothing, -SOON)
    assert keeping.returned(1, 0.0) == []
    return keeping


def test_who_comes_back_at_once_looks_after_the_work_of_the_next_lease() -> None:
    keeping, work = returning(), Work()
    assert keeping.keep(1, work, nothing, 1.0)
    assert keeping.returned(1, 1.0 + SOON) == [], "the GPU is still at it"
    work.done = True
    assert keeping.returned(1, 1.0 + SOON) == [nothing]
    assert not keeping


def test_what_its_thread_does_not_come_back_for_is_waited_for() -> None:
    keeping, work = returning(), Work()
    assert keeping.keep(1, work, nothing, 1.0)
    assert keeping.wakes <= 1.0 + 2 * BACK_S
    assert keeping.woken(1.0 + SOON) == []
    assert keeping.woken(keeping.wakes) == [(work, nothing)]
    assert not keeping
    assert not keeping.keep(1, work, nothing, 2.0), "it is trusted no more"


def test_what_was_done_when_it_was_given_back_changes_no_trust() -> None:
    keeping = returning()
    assert keeping.returned(1, 5.0) == []
    assert keeping.keep(1, Work(), nothing, 6.0)
    other = WorkKeeping(Told())
    assert other.returned(1, 5.0) == []
    assert not other.keep(1, Work(), nothing, 6.0)


def test_whoever_comes_back_late_is_not_trusted() -> None:
    keeping = returning()
    assert keeping.keep(1, Work(), nothing, 1.0)
    keeping.returned(1, 2.0)
    assert not keeping.keep(1, Work(), nothing, 2.0)
    assert not keeping.keep(2, Work(), nothing, 2.0), "nor is another thread"


@pytest.mark.parametrize("how", ["hurried", "wanted"])
def test_nothing_is_kept_from_those_that_wait(how: str) -> None:
    told = Told()
    keeping, work = returning(told), Work()
    assert keeping.keep(1, work, nothing, 1.0)
    if how == "hurried":
        told.hurried = True
    else:
        told.wanted = {"a"}
    assert keeping.woken(1.0) == [(work, nothing)]
    keeping.returned(1, 1.0)
    assert not keeping.keep(1, work, nothing, 1.0)


def test_nothing_is_kept_from_those_that_begin_to_wait_just_then() -> None:
    """A session that begins to wait looks for kept leases once, when it is told of them."""

    class JustThen(Told):
        def __getattribute__(self, name: str) -> Any:
            return bool(keeping) if name == "hurried" else super().__getattribute__(name)

    keeping = WorkKeeping(Told())
    keeping = returning(JustThen())
    assert not keeping.keep(1, Work(), nothing, 1.0)
    assert not keeping


def test_who_goes_on_sets_the_alarm_now_and_then_and_is_never_woken_for() -> None:
    keeping, alarms = returning(), set[float]()
    for step in range(1000):
        now = 1.0 + step * BACK_S / 10
        work = Work()
        assert keeping.keep(1, work, nothing, now)
        assert keeping.wakes > now
        alarms.add(keeping.wakes)
        work.done = True
        assert keeping.returned(1, now + BACK_S / 20) == [nothing]
    assert len(alarms) <= 1000 / 10 + 1


def test_who_asks_for_something_else_has_all_of_it_waited_for() -> None:
    keeping, work = returning(), Work()
    keeping.keep(1, work, nothing, 1.0)
    assert keeping.of(2) == []
    assert keeping.of(1) == [(work, nothing)]
    assert not keeping
    keeping.keep(1, work, nothing, 1.0)
    assert keeping.all() == [(work, nothing)]
    assert not keeping
