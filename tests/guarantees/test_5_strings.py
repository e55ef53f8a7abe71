"""Guarantee 5, of strings: a string from one session is harmless where people read it.

Each string of each message that a client can send is long, or has control codes of terminals.
"""

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from swapd.shared import protocol
from swapd_client import Client, InvalidArgument, connect, connect_async
from tests.guarantees.harness import MIB, Daemon, RawSession
from tests.guarantees.harness import world as a_world
from tests.samples import bare

EVIL = {
    "escape": "\x1b]0;owned\a",
    "line": "a\n2026-01-01 swapd: all is well",
    "c1": "\x9b2J",
    "delete": "\x7f",
    "bidi": "\u202egnp.exe",
    "separator": "\u2028",
    "long": "x" * (protocol.NAME_MAX_CHARS + 1),
    "huge": "x" * 50_000,
}
#: No text: a lone surrogate, which no correct client encodes.
NO_TEXT = b"\xed\xb0\x80"


def holds_text(kind: Any) -> bool:
    return kind is str or any(holds_text(one) for one in get_args(kind) if one is not Ellipsis)


def strings(union: Any) -> list[Any]:
    """Each message of the union with each of its strings, as parameters."""
    return [
        pytest.param(kind, field.name, id=f"{kind.__name__}.{field.name}")
        for kind in get_args(union)
        for field in msgspec.structs.fields(kind)
        if holds_text(field.type) or "Literal" in str(field.type)
    ]


def message(kind: type[msgspec.Struct], field: str, text: str) -> bytes:
    whole: dict[str, Any] = msgspec.msgpack.decode(protocol.encode(bare(kind)))
    tagged = whole | {"name": "a"} if "name" in whole else whole
    told = [text] if field in ("names", "also") else text
    return msgspec.msgpack.encode(tagged | {field: told})


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with a_world() as made:
        yield made.daemon()


@pytest.fixture(scope="module")
def honest(daemon: Daemon) -> Iterator[Client]:
    with connect(daemon.folder, label="honest") as client:
        client.register("mine", {"w": bytearray(MIB)})
        yield client


def assert_nobody_is_shown_it(daemon: Daemon, honest: Client) -> None:
    said = repr(honest.status(timeout=60))
    for evil in EVIL.values():
        assert repr(evil)[1:-1] not in said
    for line in daemon.log.split("\n"):
        assert line.isprintable(), repr(line)
        assert len(line) < 2000


@pytest.mark.parametrize("evil", [*EVIL, "no text"])
@pytest.mark.parametrize(("kind", "field"), strings(protocol.AnyRequest))
def test_a_request_with_such_a_string_is_refused(
    daemon: Daemon, honest: Client, kind: type[msgspec.Struct], field: str, evil: str
) -> None:
    with RawSession(daemon.folder) as raw:
        data = message(kind, field, EVIL.get(evil, "###"))
        raw.rpc.send(data if evil in EVIL else data.replace(b"###", NO_TEXT))
        refused = raw.answer()
        assert isinstance(refused, protocol.Refused)
        assert refused.code == "bad_request"
        assert refused.message.isprintable()
        assert len(refused.message) < 1000
    assert_nobody_is_shown_it(daemon, honest)


@pytest.mark.parametrize("evil", [*EVIL, "no text"])
@pytest.mark.parametrize(("kind", "field"), strings(protocol.FromClient))
def test_a_lifeline_message_with_such_a_string_ends_its_session(
    daemon: Daemon, honest: Client, kind: type[msgspec.Struct], field: str, evil: str
) -> None:
    with RawSession(daemon.folder, hello=kind is not protocol.Hello, rpc=False) as raw:
        data = message(kind, field, EVIL.get(evil, "###"))
        raw.lifeline.send(data if evil in EVIL else data.replace(b"###", NO_TEXT))
        said = raw.hear()
        assert isinstance(said, protocol.Goodbye)
        assert said.code == "bad_request"
        assert said.message.isprintable()
        assert len(said.message) < 1000
    assert_nobody_is_shown_it(daemon, honest)


def test_a_tag_that_is_no_message_s_is_quoted_harmlessly(daemon: Daemon, honest: Client) -> None:
    with RawSession(daemon.folder) as raw:
        raw.rpc.send(msgspec.msgpack.encode({"op": EVIL["escape"] * 9000, "id": 7}))
        refused = raw.answer()
        assert isinstance(refused, protocol.Refused)
        assert refused.message.isprintable()
        assert len(refused.message) < 1000
        raw.lifeline.send(msgspec.msgpack.encode({"type": EVIL["escape"] * 900}))
        said = raw.hear()
        assert isinstance(said, protocol.Goodbye)
        assert said.message.isprintable()
    assert_nobody_is_shown_it(daemon, honest)


@pytest.mark.parametrize("text", [*EVIL.values(), "\udcff"])
async def test_a_client_says_which_of_its_own_words_is_wrong(
    daemon: Daemon, honest: Client, text: str
) -> None:
    with pytest.raises(InvalidArgument, match="the label") as refused:
        connect(daemon.folder, label=text)
    assert str(refused.value).isprintable()
    with pytest.raises(InvalidArgument, match="the label"):
        await connect_async(daemon.folder, label=text)
    weights = {"w": bytearray(MIB)}
    with pytest.raises(InvalidArgument) as refused:
        honest.register(text, weights)
    assert str(refused.value).isprintable()
    with pytest.raises(InvalidArgument) as refused:
        honest.register("a", weights, policy="alternating", group=text)
    assert str(refused.value).isprintable()
    with pytest.raises(InvalidArgument) as refused:
        honest.acquire(text, timeout=60)
    assert str(refused.value).isprintable()


def test_a_program_of_any_name_can_connect(
    daemon: Daemon, honest: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in EVIL.values():
        monkeypatch.setattr("sys.argv", [f"/usr/bin/{name}\udcff"])
        with connect(daemon.folder) as client:
            ours = client.session.welcome.session
            (label,) = [s.label for s in honest.status().sessions if s.session == ours]
            assert label.isprintable()
