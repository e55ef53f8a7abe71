"""Messages cross a process border: every message survives it, also between versions."""

import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapd.shared import protocol
from tests.samples import bare, sample

Decode = Callable[[bytes], Any]

#: Each channel and direction: its decoder, and all of its messages.
CHANNELS: list[tuple[Decode, Any]] = [
    (protocol.decode_request, protocol.AnyRequest),
    (protocol.decode_reply, protocol.AnyReply),
    (protocol.decode_from_client, protocol.FromClient),
    (protocol.decode_from_daemon, protocol.FromDaemon),
]
MESSAGES = [
    pytest.param(decode, kind, id=kind.__name__)
    for decode, union in CHANNELS
    for kind in typing.get_args(union)
]
every_message = pytest.mark.parametrize(("decode", "kind"), MESSAGES)


def raw(message: msgspec.Struct) -> dict[str, Any]:
    """The message as a peer of any version decodes it."""
    found = msgspec.msgpack.decode(protocol.encode(message))
    assert isinstance(found, dict)
    return found


def tag_of(kind: type[msgspec.Struct]) -> tuple[str, str]:
    config = kind.__struct_config__
    assert config.tag_field is not None
    assert isinstance(config.tag, str)
    return config.tag_field, config.tag


# --- every message -----------------------------------------------------------------------


def test_every_message_is_carried_by_some_channel() -> None:
    carried = {kind for _, union in CHANNELS for kind in typing.get_args(union)}
    parts = {
        protocol.Account,
        protocol.Move,
        protocol.Placement,
        protocol.ComponentStatus,
        protocol.CopyStatus,
        protocol.Counts,
        protocol.Histogram,
        protocol.Blocker,
        protocol.KeptStatus,
        protocol.ProcessStatus,
        protocol.SessionStatus,
        protocol.Tally,
        protocol.UsedRanges,
        protocol.Victim,
        protocol.WaitStatus,
        protocol.WastedLoads,
    }
    bases = {protocol.Request, protocol.Reply}
    declared = {
        value
        for value in vars(protocol).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    assert declared - parts - bases == carried


@every_message
def test_a_message_comes_back_as_it_was_sent(decode: Decode, kind: type[msgspec.Struct]) -> None:
    full = sample(kind)
    assert decode(protocol.encode(full)) == full
    assert type(decode(protocol.encode(bare(kind)))) is kind
    assert decode(protocol.encode(bare(kind))) is not None


@every_message
def test_unknown_fields_are_ignored(decode: Decode, kind: type[msgspec.Struct]) -> None:
    """A later version may have more fields."""
    full = sample(kind)
    more = raw(full) | {"added_later": [1, {"deep": None}], "another": b"x"}
    assert decode(msgspec.msgpack.encode(more)) == full


@every_message
def test_fields_that_have_a_default_may_be_missing(
    decode: Decode, kind: type[msgspec.Struct]
) -> None:
    """An earlier version had fewer fields."""
    less = raw(bare(kind))
    expected = {}
    for field in msgspec.structs.fields(kind):
        if not field.required:
            less.pop(field.name, None)
            assert field.default is not msgspec.NODEFAULT
            expected[field.name] = field.default
    decoded = decode(msgspec.msgpack.encode(less))
    assert {name: getattr(decoded, name) for name in expected} == expected


@pytest.mark.parametrize(("decode", "union"), CHANNELS)
def test_no_two_messages_of_a_channel_have_the_same_tag(decode: Decode, union: Any) -> None:
    tags = [tag_of(kind) for kind in typing.get_args(union)]
    assert len(set(tags)) == len(tags)
    assert len({field for field, _ in tags}) == 1


# --- garbage -----------------------------------------------------------------------------


@pytest.mark.parametrize("decode", [decode for decode, _ in CHANNELS])
@settings(deadline=None)
@given(data=st.data())
def test_garbage_is_refused_and_nothing_worse(decode: Decode, data: st.DataObject) -> None:
    messages = [protocol.encode(bare(kind)) for kind in (protocol.Acquire, protocol.Revoke)]
    broken = bytearray(data.draw(st.sampled_from([*messages, b""])))
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)))):
        broken[at : at + 1] = bytes([byte])
    try:
        decoded = decode(bytes(broken))
    except protocol.NOT_A_MESSAGE:
        return
    assert isinstance(decoded, msgspec.Struct)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x81\xa2op\xa1\xff",
        b"\x82\xa2op\xa6status\xa1x" + b"\x91" * 100_000,
        msgspec.msgpack.encode({"op": "status"}),
        msgspec.msgpack.encode({"op": "status", "id": "1"}),
        msgspec.msgpack.encode({"op": "status", "id": 1.5}),
        msgspec.msgpack.encode({"op": "shutdown", "id": 1}),
        msgspec.msgpack.encode({"op": "acquire", "id": 1, "names": "talker"}),
        msgspec.msgpack.encode(["acquire", 1]),
        msgspec.msgpack.encode({"op": "status", "id": -1 << 63}) + b"\x00",
    ],
    ids=range(11),
)
def test_what_is_no_request_is_refused(payload: bytes) -> None:
    with pytest.raises(protocol.NOT_A_MESSAGE):
        protocol.decode_request(payload)


def test_a_number_larger_than_any_is_refused_or_itself() -> None:
    largest = protocol.encode(protocol.StatusRequest(protocol.NUMBER_MAX))
    assert protocol.decode_request(largest).id == protocol.NUMBER_MAX
    for number in (protocol.NUMBER_MAX + 1, (1 << 64) - 1, -1):
        with pytest.raises(protocol.NOT_A_MESSAGE):
            protocol.decode_request(protocol.encode(protocol.StatusRequest(number)))


# --- codes -------------------------------------------------------------------------------


def test_the_lifeline_s_largest_messages_fit_into_a_packet() -> None:
    name = "\N{FULL MOON SYMBOL}" * protocol.NAME_MAX_CHARS
    longest = [protocol.Revoke(name, 1 << 62, True), protocol.Master(name, 1 << 62)]
    assert max(len(protocol.encode(m)) for m in longest) < protocol.LIFELINE_MAX_BYTES
