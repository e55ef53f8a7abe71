"""Parts of one component, registered one by one, in one process and against a real daemon."""

import threading

import pytest
import torch

from swapd_client import DuplicateName, InvalidArgument, InvalidSource, UnknownComponent
from tests import served
from tests.threads import started

PARTS = ("rest", "0", "1")


def sources() -> dict[str, dict[str, bytes]]:
    return {name: {"x": name.encode() * 100} for name in PARTS}


def test_a_family_is_acquired_prefetched_and_taken_back_by_its_name() -> None:
    with served.pair(budget="64MiB", isolation="strict") as (_, client, other):
        made = client.register_family("dit", sources())
        assert [c.name for c in made] == ["dit/rest", "dit/0", "dit/1"]
        client.prefetch("dit")
        with client.acquire("dit", early=True) as lease:
            lease.wait()
            assert [bytes(c.view("x")) for c in made] == [n.encode() * 100 for n in PARTS]
            with other.acquire("dit"):
                assert [c.leases for c in client.status().components] == [2, 2, 2]
        other.status()  # so the daemon has received the release
        client.unregister("dit")
        assert client.status().components == ()
        assert bytes(made[0].view("x")) == b"rest" * 100, "it is private memory now"


def test_the_empty_name_is_no_family_of_those_that_have_none() -> None:
    with served.alone(budget="64MiB") as (_, client):
        client.register("a", {"x": b"1"})
        kv = client.register_scratch("kv", 4096)
        with client.acquire("a", "kv") as lease:
            for use in (
                lambda: client.unregister(""),
                lambda: client.update("", {"x": b"2"}),
                lambda: lease.fresh(""),
            ):
                with pytest.raises(UnknownComponent):
                    use()
            assert lease.fresh("kv")
        assert {c.name for c in client.status().components} == {"a", kv.name}


def test_who_holds_a_family_is_told_that_a_part_of_it_is_wanted() -> None:
    with served.pair(budget="8MiB", residency_bound=0) as (_, client, other):
        client.register_family("dit", sources())
        other.register("big", {"x": bytes(6 << 20)})
        heard = threading.Event()
        for asked in (client, other):  # the owner's lease, and one of another session
            asked.session.told.when_wanted(heard.set)
            lease = asked.acquire("dit")
            thread = started(lambda: other.acquire("big").release())
            assert heard.wait(20)
            assert lease.wanted
            lease.release()
            thread.join()
            heard.clear()


@pytest.mark.parametrize("bad", ["0", "1"])
def test_a_family_is_registered_whole_or_not_at_all(bad: str) -> None:
    with served.alone(budget="64MiB") as (_, client):
        client.register(f"dit/{bad}", {"x": b"in the way"})
        module = torch.nn.Linear(4, 4)
        before = module.weight.data_ptr()
        parts = {"rest": {"w": module.weight}} | {name: {"w": torch.ones(3)} for name in ("0", "1")}
        with pytest.raises(DuplicateName):
            client.register_family("dit", parts)
        assert module.weight.data_ptr() == before
        assert [c.name for c in client.status().components] == [f"dit/{bad}"]
        client.unregister(f"dit/{bad}")
        client.register_family("dit", parts)
        assert module.weight.data_ptr() != before


def test_parts_that_share_memory_are_refused_before_anything_is_moved() -> None:
    with served.alone(budget="64MiB") as (_, client):
        shared = torch.ones(8)
        parts = {"rest": {"head": shared}, "0": {"embedding": shared[:4]}}
        with pytest.raises(InvalidSource, match="'dit/rest' and 'dit/0'"):
            client.register_family("dit", parts)
        with pytest.raises(InvalidArgument, match="has no parts"):
            client.register_family("dit", {})
        assert client.status().components == ()
