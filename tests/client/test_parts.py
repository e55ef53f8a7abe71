"""Parts of one component, registered one by one, in one process and against a real daemon."""

import threading

import pytest
import torch

import swapd_client
from swapd_client import Conflict, DuplicateName, InvalidArgument, InvalidSource, TooLarge
from swapd_client.memory.component import Component
from tests import served
from tests.contents import bytes_of
from tests.threads import started


def test_parts_of_one_family_may_be_in_together_and_exclude_the_others() -> None:
    with served.alone(budget="64MiB", isolation="strict") as (_, client):
        for name, part_of in (("encoders/1", "encoders"), ("encoders/2", "encoders"), ("dit", "")):
            client.register(
                name, {"x": name.encode()}, policy="alternating", group="g", part_of=part_of
            )
        with pytest.raises(DuplicateName, match="stands for parts"):
            client.register("encoders", {"x": b""})
        with client.acquire("encoders/1"), client.acquire("encoders/2"):
            assert bytes(Component(client.session.own("encoders/1")).view("x")) == b"encoders/1"
            with pytest.raises(swapd_client.Timeout):
                client.acquire("dit", timeout=0)
        with client.acquire("dit"), pytest.raises(Conflict):
            client.acquire("dit", "encoders/1")
        with client.acquire("encoders/1", "encoders/2"):
            states = {c.name: c.state for c in client.status().components}
    assert states == {"encoders/1": "leased", "encoders/2": "leased", "dit": "absent"}


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


def test_of_a_family_that_never_leaves_only_what_is_kept_must_fit() -> None:
    parts = {f"{i}": {"x": bytes([i]) * (4 << 20)} for i in range(4)}
    with served.alone(budget="12MiB", isolation="strict") as (_, client):
        client.register("vae", {"x": bytes_of("vae", 4 << 20)}, policy="permanent")
        made = client.register_family("dit", parts, policy="permanent", resident="4MiB")
        for _ in range(2):
            for i, part in enumerate(made):
                with client.acquire("vae", part.name):
                    assert part.view("x")[0] == i
        assert {c.name: c.loads for c in client.status().components} == {
            **{"vae": 1, "dit/0": 2, "dit/1": 2, "dit/2": 1, "dit/3": 2}
        }
        more = {"rest": parts["0"], "0": parts["1"]}
        with pytest.raises(TooLarge, match="beside 8 MiB that never leave"):
            client.register_family("more", more, policy="permanent", resident=0)
        assert len(client.status().components) == 5


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
