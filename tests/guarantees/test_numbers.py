"""Guarantee 5, of numbers: for any numbers of one session, the daemon serves the others.

Each number of each message that a client can send is as extreme as the wire can carry it.
"""

import math
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import pytest

from swapd.shared import protocol
from swapd_client import Client, connect
from tests.guarantees.harness import MIB, Daemon, RawSession, World
from tests.guarantees.harness import world as a_world
from tests.samples import bare

WHOLE = [-(1 << 63), -1, 0, 1 << 31, 1 << 53, (1 << 63) - 1, (1 << 64) - 1]
REAL = [*WHOLE, math.nan, math.inf, -math.inf, 1e300]


#: The id of the next request; samples count up from 1.
QUESTION = 1_000_000


def numbers_in(kind: Any) -> set[type]:
    """The types, int or float, of a field of this type; in a tuple too."""
    if kind in (int, float):
        return {kind}
    if get_origin(kind) is Annotated:
        return numbers_in(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType, tuple):
        return set().union(*(numbers_in(one) for one in get_args(kind) if one is not Ellipsis))
    return set()


def is_bounded(kind: Any) -> bool:
    """Whether each int in this type has a least and a largest value."""
    if kind is int:
        return False
    if get_origin(kind) is Annotated:
        inner, *metas = get_args(kind)
        bounds = [m for m in metas if isinstance(m, msgspec.Meta)]
        return inner is not int or any(m.ge is not None and m.le is not None for m in bounds)
    return all(is_bounded(one) for one in get_args(kind) if one is not Ellipsis)


def extremes(union: Any) -> list[Any]:
    """Each message of the union with each of its numbers at each extreme, as parameters."""
    return [
        pytest.param(
            kind,
            {field.name: [value] if get_origin(field.type) is tuple else value},
            id=f"{kind.__name__}.{field.name}={value}",
        )
        for kind in get_args(union)
        for field in msgspec.structs.fields(kind)
        for value in values_of(numbers_in(field.type))
    ]


def values_of(found: set[type]) -> list[Any]:
    if float in found:
        return REAL
    return WHOLE if found else []


def message(kind: type[msgspec.Struct], **said: Any) -> bytes:
    """A message of its required fields only, and those in `said`."""
    whole: dict[str, Any] = msgspec.msgpack.decode(protocol.encode(bare(kind)))
    return msgspec.msgpack.encode(whole | said)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with a_world() as made:
        yield made.daemon()


@pytest.fixture(scope="module")
def honest(daemon: Daemon) -> Iterator[Client]:
    with connect(daemon.folder, label="honest") as client:
        client.register("mine", {"w": bytearray(MIB)})
        yield client


def assert_served(honest: Client) -> None:
    """The daemon grants the honest session its lease, and reports its status."""
    with honest.acquire("mine", timeout=60):
        status = honest.status(timeout=60)
    (mine,) = [c for c in status.components if c.name == "mine"]
    assert mine.session == honest.session.welcome.session


@pytest.mark.parametrize("union", [protocol.AnyRequest, protocol.FromClient])
def test_every_whole_number_that_a_client_says_is_bounded(union: Any) -> None:
    unbounded = [
        f"{kind.__name__}.{field.name}"
        for kind in get_args(union)
        for field in msgspec.structs.fields(kind)
        if not is_bounded(field.type)
    ]
    assert unbounded == []


@pytest.mark.parametrize(("kind", "said"), extremes(protocol.AnyRequest))
def test_a_request_with_an_extreme_number_costs_nobody_else(
    daemon: Daemon, honest: Client, kind: type[msgspec.Struct], said: dict[str, Any]
) -> None:
    with RawSession(daemon.folder) as raw:
        raw.rpc.send(message(kind, **said))
        # the message may have no answer, one way or not; the next request has one
        raw.rpc.send(protocol.encode(protocol.StatusRequest(QUESTION)))
        while (reply := raw.answer()).id != QUESTION:
            assert isinstance(reply, protocol.AnyReply)
        assert isinstance(reply, protocol.Status)
        assert_served(honest)


@pytest.mark.parametrize(("kind", "said"), extremes(protocol.FromClient))
def test_a_lifeline_message_with_an_extreme_number_costs_nobody_else(
    daemon: Daemon, honest: Client, kind: type[msgspec.Struct], said: dict[str, Any]
) -> None:
    with RawSession(daemon.folder, hello=kind is not protocol.Hello, rpc=False) as raw:
        raw.lifeline.send(message(kind, **said))
        if kind is protocol.Hello:
            assert isinstance(raw.hear(), protocol.Goodbye)
        assert_served(honest)


def test_hits_that_a_session_makes_up_are_counted_as_far_as_can_be_said(world: World) -> None:
    daemon = world.daemon()
    with RawSession(daemon.folder) as raw, connect(daemon.folder, label="honest") as honest:
        raw.register("a", MIB)
        for again in ((1 << 63) - 1, (1 << 64) - 1, -1):
            granted = raw.acquire("a")
            refused = raw.ask(protocol.Release(raw.next_id(), granted.id, ack=True, again=again))
            assert isinstance(refused, protocol.Refused)
            assert refused.code == "bad_request"
            assert daemon.component("a").leases == 1
            raw.release(granted)
        before = honest.status(timeout=60).hits
        for _ in range(3):
            granted = raw.acquire("a")
            most = protocol.Release(raw.next_id(), granted.id, ack=True, again=protocol.USES_MAX)
            assert isinstance(raw.ask(most), protocol.Done)
        assert honest.status(timeout=60).hits == before + 3 * (protocol.USES_MAX + 1)


def test_every_id_that_is_refused_is_told_whose_it_was(daemon: Daemon, honest: Client) -> None:
    with RawSession(daemon.folder) as raw:
        for number in (-1, (1 << 63) - 1, (1 << 64) - 1):
            raw.rpc.send(message(protocol.StatusRequest, id=number))
            refused = raw.answer()
            assert isinstance(refused, protocol.Refused)
            assert (refused.id, refused.code) == (number, "bad_request")
            assert "$.id" in refused.message
        raw.rpc.send(message(protocol.StatusRequest, id=True))
        assert raw.answer().id == 0
        assert_served(honest)
