"""A lease that came back is kept for the next use, nobody waits for it, and none is lost."""

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any, cast

import pytest

import swapd_client
from swapd import spawn
from swapd.shared.protocol import PAST_MAX_S, Granted
from swapd.spawn import Spawned
from swapd_client import Client, Deadlock, Lease, SessionFenced, Timeout
from swapd_client.interrupts import covered
from swapd_client.leases.cache import Cache
from swapd_client.leases.record import Record
from tests.contents import bytes_of
from tests.sleeping import more_sleeps, sleeps
from tests.threads import run_together, started

MIB = 1 << 20
NEVER_S = 3600.0


@pytest.fixture
def daemon() -> Iterator[Spawned]:
    # a minimum residency that never ends: a lease that is kept must not count as used
    with spawn.daemon(budget="16MiB", residency_factor=1e6, residency_bound=1e6) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Spawned) -> Iterator[Client]:
    with swapd_client.connect(daemon.folder) as client:
        for name, mib in (("a", 1), ("b", 1), ("large", 12), ("huge", 12)):
            client.register(name, {"x": bytes_of(name, mib * MIB)})
        yield client


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that nobody asks for is kept for an hour."""
    monkeypatch.setattr("swapd_client.leases.cache.KEEP_S", NEVER_S)
    monkeypatch.setattr("swapd_client.lease.KEEP_S", NEVER_S)


def leased(client: Client) -> set[str]:
    return {c.name for c in client.status().components if c.leases}


def keep(client: Client, *names: str) -> None:
    """This thread uses each of them in turn, until their leases are kept."""
    for _ in range(3):
        for name in names:
            client.acquire(name).release()


def await_none(other: Client) -> None:
    while leased(other):
        pass


def numbers(client: Client, *names: str) -> list[int]:
    seen = []
    for name in names:
        with client.acquire(name) as lease:
            seen.append(lease.number)
    return seen


def test_several_that_one_thread_uses_in_turn_are_all_kept(client: Client, endless: None) -> None:
    keep(client, "a", "b")
    assert numbers(client, "a", "b") == numbers(client, "a", "b")
    lease = client.acquire("a")
    assert (lease.waited_s, lease.loaded) == (0.0, False)
    lease.release()


def test_the_first_release_of_a_lease_reaches_the_daemon_at_once(
    client: Client, other: Client, endless: None
) -> None:
    lease = client.acquire("a")
    lease.release()
    await_none(other)
    lease.release()  # a second one does nothing


def test_a_kept_lease_that_nobody_uses_is_given_back(client: Client, other: Client) -> None:
    keep(client, "a")
    await_none(other)


def test_hits_wake_no_thread(client: Client, endless: None) -> None:
    """Neither in a loop over one component, nor over several in turn."""
    for names in ("a", "ab"):
        keep(client, *names)
        before = sleeps()
        for _ in range(50):
            for name in names:
                client.acquire(name).release()
        assert not more_sleeps(before), names


def test_another_process_gets_its_memory_at_once(
    client: Client, other: Client, endless: None
) -> None:
    keep(client, "large")
    assert leased(other) == {"large"}
    with other.acquire("huge"):
        assert "large" not in leased(other)
    assert not client.session.told.wanted


def test_its_own_thread_gets_its_memory_with_the_same_message(
    client: Client, endless: None
) -> None:
    """Not only when the lifeline has told that somebody waits."""
    keep(client, "large")
    # the thread that hears of waiters gives nothing back
    client.session.lifeline.sweep = lambda: NEVER_S
    for name in ("huge", "large", "huge"):
        client.acquire(name, timeout=20.0).release()


def test_leases_offered_in_vain_are_kept_on(client: Client, endless: None) -> None:
    keep(client, "a", "b")
    before = numbers(client, "a")
    client.acquire("a", "b").release()  # a message that need not wait for memory
    assert numbers(client, "a") == before


def test_a_lease_that_ended_for_an_acquire_that_failed_is_not_used_again(
    client: Client, other: Client, endless: None
) -> None:
    """Not even if the daemon grants the thread's next acquire without a word of it."""
    client.acquire("b").release()  # it is in, so another acquire of it ends nothing
    keep(client, "a")
    # the acquire is over before this thread gives it back
    client.session.lifeline.sweep = lambda: NEVER_S
    with other.acquire("huge"):
        with pytest.raises(Timeout):
            client.acquire("large", timeout=0.1)
        client.acquire("b").release()
        with client.acquire("a"):
            assert "a" in leased(other)


def test_a_thread_that_waits_gives_way_to_another_with_what_it_keeps(client: Client) -> None:
    """What it keeps is no part of a deadlock; what it has in use is."""
    for name in ("one", "two"):
        client.register(name, {"x": bytes_of(name, 8 * MIB)})
    keep(client, "one", "two")
    done = []

    def swap(first: str, second: str) -> None:
        for _ in range(20):
            client.acquire(first).release()
            client.acquire(second, timeout=20.0).release()
        done.append(first)

    threads = [threading.Thread(target=swap, args=names) for names in (("large", "one"),) * 2]
    run_together(*threads)
    assert len(done) == 2
    with client.acquire("large"), pytest.raises(Deadlock):
        client.acquire("huge")


def test_what_is_kept_or_held_of_a_session_that_is_fenced_is_no_lease_and_no_obstacle(
    client: Client, other: Client, endless: None
) -> None:
    other.register("other's", {"x": b"abc"})
    keep(client, "a")
    held = client.acquire("other's")
    client.session._cut_off(SessionFenced("injected"))
    for use in (partial(client.acquire, "a"), partial(held.wait, stream=0), held.release):
        with pytest.raises(SessionFenced):
            use()
    client.close()


def test_a_release_that_the_daemon_cannot_read_now_is_told_later(
    client: Client, other: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifeline, refused = client.session.lifeline, threading.Event()
    try_send = lifeline.try_send

    def is_full(message: bytes) -> bool:
        monkeypatch.setattr(lifeline, "try_send", try_send)
        refused.set()
        return False

    monkeypatch.setattr(lifeline, "try_send", is_full)
    keep(client, "a")
    refused.wait()
    await_none(other)


def test_a_lease_in_a_lease_on_the_same_is_not_the_same(client: Client) -> None:
    keep(client, "a")
    with client.acquire("a") as outer, client.acquire("a") as inner:
        assert outer.number != inner.number
    with client.acquire("a") as outer:
        client.acquire("a").release()
        assert leased(client) == {"a"}


def test_new_values_reach_who_keeps_the_old_ones(client: Client, endless: None) -> None:
    keep(client, "a")
    started(client.update, "a", {"x": b"\1" * MIB}).join()
    part = client.session.own("a")
    from swapd_client.memory.component import Component

    with client.acquire("a"):
        assert bytes(Component(part).view("x"))[:1] == b"\1"


@pytest.mark.parametrize("ask", ["evict", "unregister", "acquire_start"])
def test_a_kept_lease_is_no_use_for_the_requests_of_any_thread(
    client: Client, endless: None, ask: str
) -> None:
    keep(client, "a")
    started(keep, client, "a").join()
    if ask == "acquire_start":
        client.acquire_start().release()
    else:
        getattr(client, ask)("a")


def test_an_unregister_overtakes_no_release_that_another_thread_sent(client: Client) -> None:
    """ZeroMQ keeps the order of one socket's messages, but not of two sockets'."""
    late: list[bytes] = []

    class Late:
        """A socket whose messages are still on their way."""

        def __init__(self, socket: Any) -> None:
            self.socket = socket

        def send(self, data: bytes, flags: int) -> None:
            late.append(data)

    with ThreadPoolExecutor(1) as pool:
        lease = pool.submit(client.acquire, "a").result()
        line = pool.submit(client.leasing.factory.channel).result()._line
        socket, line.socket = line.socket, cast("Any", Late(line.socket))
        pool.submit(lease.release).result()
        line.socket = socket
        assert len(late) == 1
        client.unregister("a")
        pool.submit(socket.send, late[0]).result()
        with pool.submit(client.acquire, "b").result():
            assert leased(client) == {"b"}


def test_a_gap_that_no_message_may_have_is_left_out(
    client: Client, other: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(client, "a")
    record = next(iter(client.leasing.cache.records.values()))
    record.gap_s, record.since = -1.0, -2 * PAST_MAX_S
    client.session.lifeline.ring()
    await_none(other)


# --- interrupts ---------------------------------------------------------------------------


#: A test that raises from SIGALRM takes it from the test's own time limit.
pytestmark = pytest.mark.timeout(120, method="thread")


class Stop(BaseException):
    """Raised by a signal handler."""


def stop(number: int, frame: object) -> None:
    raise Stop


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, stop)
    gc.disable()  # an exception in a finalizer of anything that is collected then is lost
    yield
    gc.enable()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def in_a_block(client: Client) -> None:
    global lease
    with client.acquire("a") as lease:
        pass


def nested(client: Client) -> None:
    with client.acquire("a"), client.acquire("b"):
        in_a_block(client)


def in_a_stack(client: Client) -> None:
    with ExitStack() as stack:
        stack.enter_context(client.acquire("b"))


def by_messages(client: Client) -> None:
    client.acquire("a", "b").release()
    client.evict("a")


def swaps(client: Client) -> None:
    for name in ("large", "huge"):
        client.acquire(name).release()


#: The lease of the last block: a variable of a notebook keeps it alive.
lease: Lease | None = None


@pytest.mark.filterwarnings("ignore:a lease of:ResourceWarning")
@pytest.mark.parametrize("use", [in_a_block, nested, in_a_stack, by_messages, swaps])
def test_an_exception_of_a_signal_handler_leaks_no_lease_and_is_never_lost(
    client: Client, other: Client, handler: None, use: Callable[[Client], None]
) -> None:
    """Also while its traceback is kept."""
    random = Random(1)
    kept: list[Stop] = []
    most_s = 0.02 if use is swaps else 0.002
    for count in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, most_s))
            try:
                while True:
                    use(client)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Stop as exc:
            if use is not in_a_stack:  # its own frames would keep the lease
                kept.append(exc)
        if count % 100 == 99:
            await_none(other)  # though this thread asks for nothing more
            kept.clear()
    assert leased(other) == set()
    use(client)


def test_the_first_instruction_is_covered() -> None:
    class Left(Exception):
        pass

    done = []

    @covered
    def function(how: str) -> str:
        try:
            return how
        except BaseException:
            done.append(how)
            raise

    def before_the_first(frame, event, arg):  # type: ignore[no-untyped-def]
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            raise Left
        return before_the_first

    assert function("as ever") == "as ever"
    assert not done

    def interrupted() -> None:
        try:
            sys.settrace(before_the_first)
            function("interrupted")
        finally:
            sys.settrace(None)

    with pytest.raises(Left):
        interrupted()
    assert done == ["interrupted"]


def test_a_release_beside_a_sweep_is_not_taken_for_a_lease_that_nobody_released() -> None:
    """Such a lease would end with all work of the GPU, which spoils graphs that are captured."""

    class Holder:
        pass

    class Released(dict[Any, Any]):
        """The lease is released, and its object dies, just after the sweep has looked."""

        def copy(self) -> dict[Any, Any]:
            seen = dict(self)
            self.clear()
            holder.clear()
            return seen

    cache = Cache(lambda: None)
    record = Record(1, ("a",), 1)
    record.granted = Granted(1, ())
    holder = [Holder()]
    cache.records[1, ("a",)] = record
    cache.holders = Released({(1, ("a",)): weakref.ref(holder[0])})
    cache.free()
    assert not record.unmarked
