"""`client.forecast` against a real daemon: the acquire then does as forecast."""

import pytest

from swapd.shared.protocol import Victim
from swapd_client import InvalidArgument, TooLarge, UnknownComponent
from tests import served
from tests.contents import bytes_of

MIB = 1 << 20


def test_what_is_foretold_is_what_happens() -> None:
    with (
        served.pair("first", "second", budget="16MiB", isolation="strict", residency_factor=0) as (
            _,
            client,
            other,
        ),
    ):
        client.register("a", {"x": bytes_of("a", 10 * MIB)})
        client.register("b", {"x": bytes_of("b", 10 * MIB)})
        assert client.forecast("b").seconds is None  # no load was measured yet
        client.acquire("a").release()

        foretold = client.forecast("b")
        assert foretold.bytes_in == 10 * MIB
        assert foretold.victims == (Victim("a", 10 * MIB, 0, "room"),)
        assert foretold.seconds
        before = client.status()
        assert (before.loads, before.evictions) == (1, 0), "a forecast changed something"

        client.acquire("b").release()
        after = client.status()
        assert (after.bytes_in - before.bytes_in, after.evictions) == (10 * MIB, 1)
        assert client.forecast("b").bytes_in == 0

        with other.acquire("b"):
            held = client.forecast("a")
            assert not held.at_once
            assert held.waits_for[0].name == "b"
            assert "second (session" in held.waits_for[0].why


def test_it_raises_what_the_acquire_would() -> None:
    with served.alone(budget="16MiB") as (_, client):
        client.register("a", {"x": bytes_of("a", 10 * MIB)})
        client.register("b", {"x": bytes_of("b", 10 * MIB)})
        with pytest.raises(UnknownComponent, match="did you mean"):
            client.forecast("aa")
        with pytest.raises(TooLarge, match="--budget"):
            client.forecast("a", "b")
        with pytest.raises(InvalidArgument, match="at least one"):
            client.forecast()


def test_what_is_in_comes_first_and_what_waits_for_a_holder_last() -> None:
    sizes = {"held": 6, "large": 6, "small": 2, "in": 4}
    with served.pair(budget="16MiB", residency_factor=0) as (_, client, other):
        for name, mib in sizes.items():
            client.register(name, {"x": bytes_of(name, mib * MIB)})
        client.acquire("in").release()
        with other.acquire("held"):
            client.register("too large beside it", {"x": bytes(12 * MIB)})
            found = client.cheapest(["too large beside it", *sizes, "in"])
        assert [one.names for one in found] == [
            *(("held",), ("in",), ("small",), ("large",)),
            ("too large beside it",),
        ]
        assert [one.bytes_in // MIB for one in found] == [0, 0, 2, 6, 12]
        with pytest.raises(UnknownComponent):
            client.cheapest(["in", "nobody's"])
        assert client.cheapest([]) == []
