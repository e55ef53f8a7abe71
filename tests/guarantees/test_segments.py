"""Acquires that are early: guarantees 1 and 6 hold segment by segment."""

import random
import select
from typing import Any

import pytest

from swapd.shared.protocol import AnyReply, AnyRequest
from swapd_client import DaemonGone, connect
from swapd_client.session.channel import Channel
from tests.guarantees.harness import MIB, WorkerError, World

#: Slow enough that a test can overtake a copy; no test waits for it.
SLOW = "40MB/s"


def test_1_a_segment_s_bytes_are_there_when_the_wait_for_it_ends(world: World) -> None:
    daemon = world.daemon(bandwidth="400MB/s")
    one, two = world.workers(daemon, "one", "two")
    digests = one.register_in_segments("a", 2 * MIB, 6)
    two.register("b", 12 * MIB)
    for _ in range(3):
        assert one.acquire("a", early=True)["loaded"]
        assert [one.arrive("a", i) for i in range(6)] == digests
        one.release("a")
        two.use("b")  # so "a" must be loaded again


def test_1_what_is_still_coming_in_is_not_evicted_however_early_it_is_released(
    world: World,
) -> None:
    daemon = world.daemon(bandwidth=SLOW)
    one, two = world.workers(daemon, "one", "two")
    digests = one.register_in_segments("a", 2 * MIB, 6)
    b = two.register("b", 12 * MIB, seed=9)
    one.acquire("a", early=True)
    waiting = two.start("use", "b")
    daemon.await_record("Waiting", names=("b",))
    one.release("a")
    assert waiting.result()[1] == b
    daemon.await_record("CopiedIn")  # and only then
    daemon.await_record("Evict", name="a")
    one.acquire("a", early=True)
    assert one.arrive("a", 5) == digests[5]


def test_6_a_wait_for_a_segment_ends_when_the_daemon_dies(world: World) -> None:
    daemon = world.daemon(bandwidth=SLOW)
    (one,) = world.workers(daemon, "one")
    one.register_in_segments("a", 4 * MIB, 3)
    one.acquire("a", early=True)
    waiting = one.start("arrive", "a", 2)
    daemon.kill()
    with pytest.raises(WorkerError, match="the daemon is gone") as gone:
        waiting.result()
    assert gone.value.kind == "DaemonGone"


def test_7_what_was_still_coming_in_is_whole_after_close(world: World) -> None:
    daemon = world.daemon(bandwidth=SLOW)
    (one,) = world.workers(daemon, "one")
    held = one.register_in_segments("a", 2 * MIB, 3, mutable=True)
    released = one.register_in_segments("b", 2 * MIB, 3, mutable=True)
    one.acquire("a", early=True)
    one.acquire("b", early=True)
    one.release("b")
    daemon.kill()
    one.await_end()
    one.disconnect()
    assert one.see("a", 3) == held
    assert one.see("b", 3) == released


def test_7_a_grant_that_is_seen_after_the_daemon_died_is_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the bytes that had not arrived would count as the component's latest."""
    daemon = world.daemon(bandwidth=SLOW)
    data = random.Random(5).randbytes(6 * MIB)
    with connect(daemon.folder, label="late", reconnect=0) as client:
        part = client.register("a", {"data": bytearray(data)}, mutable=True)
        call = Channel.call

        def late(self: Channel, request: AnyRequest, *rest: Any, **named: Any) -> AnyReply:
            reply = call(self, request, *rest, **named)
            daemon.kill()
            select.select([client.session.life.ended.fileno()], [], [])
            return reply

        monkeypatch.setattr(Channel, "call", late)
        with pytest.raises(DaemonGone):
            client.acquire("a", early=True)
    assert bytes(part.view("data")) == data


def test_6_another_session_s_component_is_waited_for_as_a_whole(world: World) -> None:
    daemon = world.daemon(bandwidth="400MB/s")
    one, two = world.workers(daemon, "one", "two")
    one.register("a", 8 * MIB)
    two.acquire("a", early=True)
    assert daemon.component("a").state == "leased"
    two.release("a")


def test_segments_must_name_something(world: World) -> None:
    (one,) = world.workers(world.daemon(), "one")
    with pytest.raises(WorkerError, match="segment 1") as refused:
        one.register("a", MIB, segments=[["data"], ["block.1"]])
    assert refused.value.kind == "InvalidSource"
