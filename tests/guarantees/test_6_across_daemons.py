"""Guarantee 6, of two daemons: threads of one process that wait for each other at both."""

import threading

import pytest

from swapd_client import Client, Deadlock, SwapdError, connect, cross_deadlock
from swapd_client.session import channel
from swapd_client.session.channel import Channel, ChannelFactory
from tests.contents import bytes_of
from tests.guarantees.harness import MIB, Daemon, World

PATIENCE_S = 60.0


@pytest.fixture
def daemons(world: World) -> tuple[Daemon, Daemon]:
    return world.daemon("a"), world.daemon("b")


def registered(daemon: Daemon, nbytes: int) -> Client:
    client = connect(daemon.folder)
    for name in "xy":
        client.register(name, {"data": bytes_of(name, nbytes)})
    return client


class Crossing:
    """Two threads: each holds "x" of one daemon, and acquires "y" of the other."""

    def __init__(self, a: Client, b: Client) -> None:
        self.errors: list[SwapdError] = []
        self.granted = 0
        self._both = threading.Barrier(2)
        self.threads = [
            threading.Thread(target=self._cross, args=both) for both in ((a, b), (b, a))
        ]
        for thread in self.threads:
            thread.start()

    def _cross(self, first: Client, second: Client) -> None:
        try:
            with first.acquire("x"):
                self._both.wait(PATIENCE_S)
                with second.acquire("y"):
                    self.granted += 1
        except SwapdError as exc:
            self.errors.append(exc)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert not cross_deadlock.waits, "another thread takes them for waits that go on"


def test_threads_that_acquire_from_two_daemons_in_opposite_orders_get_a_deadlock(
    daemons: tuple[Daemon, Daemon],
) -> None:
    """Room for one component of each daemon; one thread gets the error, and the other goes on."""
    one, two = daemons
    with registered(one, 16 * MIB) as a, registered(two, 16 * MIB) as b:
        crossing = Crossing(a, b)
        crossing.join()
    (error,) = crossing.errors
    assert isinstance(error, Deadlock)
    assert crossing.granted == 1
    for said in (*(str(t.ident) for t in crossing.threads), str(one.folder), str(two.folder)):
        assert said in str(error)


def test_threads_whose_leases_are_not_in_the_way_are_no_deadlock(
    daemons: tuple[Daemon, Daemon],
) -> None:
    """Both wait for a third holder, not for each other: they get what they ask for."""
    one, two = daemons
    with registered(one, 4 * MIB) as a, registered(two, 4 * MIB) as b:
        for client in (a, b):
            client.register("big", {"data": bytearray(10 * MIB)})
        with a.acquire("big"), b.acquire("big"):
            crossing = Crossing(a, b)
            first, second = crossing.threads
            looks = two if (first.ident or 0) > (second.ident or 0) else one
            looks.await_record("Refuse", code="timeout")  # asked on behalf of the other thread
        crossing.join()
    assert not crossing.errors
    assert crossing.granted == 2


def test_what_is_granted_to_a_thread_that_looks_for_a_deadlock_is_not_kept_from_others(
    daemons: tuple[Daemon, Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = daemons
    with registered(one, 4 * MIB) as a, registered(two, 4 * MIB) as b:
        for client in (a, b):
            client.register("big", {"data": bytearray(10 * MIB)})
        big = [client.acquire("big") for client in (a, b)]

        def looks(factory: ChannelFactory) -> Channel:
            for lease in big:  # so both get what they wait for, and so does who asks for them
                lease.release()
            return Channel(factory)

        monkeypatch.setattr(channel, "STILL_MS", 10)
        monkeypatch.setattr(cross_deadlock, "PROBE_S", PATIENCE_S)
        monkeypatch.setattr(cross_deadlock, "Channel", looks)
        Crossing(a, b).join()
        for client in (a, b):
            client.unregister("y")
