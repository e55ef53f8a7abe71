"""Records of the swap log: what one line says, as bytes and as values. `README.md` has the schema.

Every line is one flat JSON object. The first record of a daemon says which schema its run is in;
a reader refuses all others in words. Lives here: both directions. May not live here: files.
"""

import re
from typing import Any, Literal, get_args

import msgspec

from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent, Asked
from swapd.core.policy import Rules
from swapd.shared.protocol import AnyOrder

#: Counts up when a record of the one before may mean something else. What there is may get more
#: fields, and kinds may be added, without.
SCHEMA = 1


class OtherSchema(Exception):
    """A record is of a run in another schema. The message says which, and what to do."""

    def __init__(self, found: int) -> None:
        self.found = found
        what = f"in schema {found}" if found else "by a swapd before schemas were numbered"
        super().__init__(
            f"this swap log was written {what}, and this swapd reads schema {SCHEMA}: read it with "
            "the version that wrote it"
        )


class Start(msgspec.Struct, frozen=True):
    """The first record of a daemon: with it and the events, every decision can be replayed."""

    version: str
    device: str
    chunks: int
    chunk_bytes: int
    rules: Rules


class Record(msgspec.Struct, frozen=True):
    """One line of the log. Exactly one of `start`, `event`, `action`, `dropped` is set.

    `seq` counts up by one. `cause` is the seq of the event that led to an action, or of
    the action that an event completes; 0 for what came from outside. `time` is Unix time
    in seconds.
    """

    seq: int
    cause: int
    time: float
    start: Start | None = None
    event: AnyEvent | None = None
    action: AnyAction | None = None
    dropped: int = 0


class Head(msgspec.Struct, gc=False):
    """What the line of an event or action begins with."""

    seq: int
    t: float
    type: str
    cause: int


class AskedHead(msgspec.Struct, gc=False):
    """The same of a request, which is a kind of its own, beside what its sender sent."""

    seq: int
    t: float
    type: str
    cause: int
    now: float
    session: int


class _StartHead(msgspec.Struct, gc=False):
    seq: int
    t: float
    type: str = "start"
    schema: int = SCHEMA


class _Dropped(msgspec.Struct, gc=False):
    seq: int
    t: float
    type: str
    count: int


class _Begin(msgspec.Struct):
    """What tells how to read the rest of a line."""

    seq: int
    t: float
    type: Literal["start", "event", "action", "dropped"]
    kind: str = ""
    cause: int = 0
    schema: int = 0
    count: int = 0


class _Whose(msgspec.Struct):
    """What a request has in the log and not on the wire."""

    now: float
    session: int


class _Unnumbered(msgspec.Struct):
    """What records had before schemas were numbered."""

    seq: int
    cause: int
    time: float


_TIME = re.compile(rb'\{"seq":[0-9]{1,20},"t":([0-9.]{1,32}),')
_encoder = msgspec.json.Encoder()
_begin = msgspec.json.Decoder(_Begin).decode
_whose = msgspec.json.Decoder(_Whose).decode
_unnumbered = msgspec.json.Decoder(_Unnumbered).decode
_start = msgspec.json.Decoder(Start).decode


def _by_kind(union: Any) -> dict[str, msgspec.json.Decoder[Any]]:
    kinds = get_args(union)
    return {str(kind.__struct_config__.tag): msgspec.json.Decoder(kind) for kind in kinds}


_REQUESTS = _by_kind(AnyOrder)
_EVENTS = _by_kind(AnyEvent)
_ACTIONS = _by_kind(AnyAction)

#: All that a record can be, as it says itself.
KINDS = frozenset({"start", "dropped", *_REQUESTS, *_EVENTS, *_ACTIONS})

#: A head, and the event, the request or the action that it is of, in turn.
Parts = list[msgspec.Struct]


def render_all(parts: Parts) -> list[bytes]:
    """Lines of events and actions, less their ends. Raises: one of `protocol.NOT_ENCODABLE`.

    They are encoded in one go, head and rest each as a line: a line that begins with its tag goes
    on with the one before. No line is broken inside: JSON has no bare newline in a string.
    """
    data = _encoder.encode_lines(parts).replace(b'}\n{"op":', b',"kind":')
    return data.split(b"\n")[:-1]


def render(record: Record) -> bytes:
    """One line, less its end. Raises: one of `protocol.NOT_ENCODABLE`."""
    seq, t, cause = record.seq, record.time, record.cause
    if record.event is not None:
        event = record.event
        if type(event) is Asked:
            head = AskedHead(seq, t, "event", cause, event.now, event.session)
            (line,) = render_all([head, event.request])
        else:
            (line,) = render_all([Head(seq, t, "event", cause), event])
    elif record.action is not None:
        (line,) = render_all([Head(seq, t, "action", cause), record.action])
    elif record.start is not None:
        begin, rest = _encoder.encode(_StartHead(seq, t)), _encoder.encode(record.start)
        line = begin[:-1] + b"," + rest[1:]
    else:
        line = _encoder.encode(_Dropped(seq, t, "dropped", record.dropped))
    return line


def began(head: bytes, otherwise: float) -> float:
    """When a record was made whose line begins so; `otherwise` if it does not say."""
    found = _TIME.match(head)
    return float(found[1]) if found else otherwise


def missed(before: bytes, count: int) -> bytes:
    """The line that says of a reader that it did not get so many, up to the line that follows."""
    following = _begin(before)
    return _encoder.encode(_Dropped(following.seq, following.t, "dropped", count))


def parse(line: bytes | str) -> Record:
    """Raises: OtherSchema; msgspec.MsgspecError, ValueError, RecursionError for what is none."""
    try:
        head = _begin(line)
    except msgspec.ValidationError:
        if _is_unnumbered(line):
            raise OtherSchema(0) from None
        raise
    seq, cause, time = head.seq, head.cause, head.t
    match head.type:
        case "event" if decoder := _REQUESTS.get(head.kind):
            whose = _whose(line)
            asked = Asked(whose.now, whose.session, decoder.decode(line))
            return Record(seq, cause, time, event=asked)
        case "event":
            return Record(seq, cause, time, event=_known(_EVENTS, head.kind).decode(line))
        case "action":
            return Record(seq, cause, time, action=_known(_ACTIONS, head.kind).decode(line))
        case "dropped":
            return Record(seq, cause, time, dropped=head.count)
        case "start":
            if head.schema != SCHEMA:
                raise OtherSchema(head.schema)
            return Record(seq, cause, time, start=_start(line))


def _known(kinds: dict[str, msgspec.json.Decoder[Any]], kind: str) -> msgspec.json.Decoder[Any]:
    if kind not in kinds:
        raise msgspec.ValidationError(f"no kind of record: {kind!r}")
    return kinds[kind]


def _is_unnumbered(line: bytes | str) -> bool:
    try:
        _unnumbered(line)
    except msgspec.ValidationError:
        return False
    return True
