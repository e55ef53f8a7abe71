"""Records of the swap log, as bytes and as values, in both directions. `README.md` has the schema.

Each line is one flat JSON object. The first record of a daemon names the schema of its run; a
reader refuses other schemas.
"""

import re
from typing import Any, Literal, get_args

import msgspec

from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent, Event, SessionRequest
from swapd.core.records import Rules
from swapd.shared.errors import UserError
from swapd.shared.protocol import AnyOrder

#: Increase it when existing records change their meaning, not for new fields or kinds.
SCHEMA = 1


class SchemaMismatch(UserError):
    """A record belongs to a run in another schema. The message tells how to read it."""

    def __init__(self, found: int) -> None:
        self.found = found
        what = f"in schema {found}" if found else "without the number of a schema"
        super().__init__(
            f"this swap log was written {what}, and this swapd reads schema {SCHEMA}: read it with "
            "the version that wrote it"
        )


class Start(msgspec.Struct, frozen=True):
    """The first record of a daemon. With it and the events, all decisions can be replayed."""

    version: str
    device: str
    chunks: int
    chunk_bytes: int
    rules: Rules


class Record(msgspec.Struct, frozen=True):
    """One line of the log. Exactly one of `start`, `event`, `action`, `dropped` is set.

    `seq` counts up by one. `cause` is the seq of the event that led to an action, or of the action
    that an event completes; 0 for an event from outside. `time` is Unix time in seconds.
    """

    seq: int
    cause: int
    time: float
    start: Start | None = None
    event: AnyEvent | None = None
    action: AnyAction | None = None
    dropped: int = 0


class Head(msgspec.Struct, gc=False):
    seq: int
    t: float
    type: str
    cause: int


class RequestHead(Head, gc=False):
    """First fields of a request. Its kind and the fields from the wire follow."""

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
    """Fields that tell how to read the rest of a line."""

    seq: int
    t: float
    type: Literal["start", "event", "action", "dropped"]
    kind: str = ""
    cause: int = 0
    schema: int = 0
    count: int = 0


_TIME = re.compile(rb'\{"seq":[0-9]{1,20},"t":([0-9]{1,20}(?:\.[0-9]{1,20})?),')
_encoder = msgspec.json.Encoder()
_begin = msgspec.json.Decoder(_Begin).decode
_asked_head = msgspec.json.Decoder(RequestHead).decode
_start = msgspec.json.Decoder(Start).decode


def _by_kind(union: Any) -> dict[str, msgspec.json.Decoder[Any]]:
    kinds = get_args(union)
    return {str(kind.__struct_config__.tag): msgspec.json.Decoder(kind) for kind in kinds}


_REQUESTS = _by_kind(AnyOrder)
_EVENTS = _by_kind(AnyEvent)
_ACTIONS = _by_kind(AnyAction)

KINDS = frozenset({"start", "dropped", *_REQUESTS, *_EVENTS, *_ACTIONS})

#: Heads, each followed by its event, request or action.
Parts = list[msgspec.Struct]


def parts_of(seq: int, t: float, cause: int, item: AnyEvent | AnyAction) -> Parts:
    if type(item) is SessionRequest:
        return [RequestHead(seq, t, "event", cause, item.now, item.session), item.request]
    return [Head(seq, t, "event" if isinstance(item, Event) else "action", cause), item]


def render_all(parts: Parts) -> list[bytes]:
    """Return lines of events and actions, without line ends. Raises: one of
    `protocol.NOT_ENCODABLE`.

    Encodes all in one call, heads and rests as a line each, and joins a line that begins with its
    tag to the one before: JSON strings contain no bare newline.
    """
    data = _encoder.encode_lines(parts).replace(b'}\n{"op":', b',"kind":')
    return data.split(b"\n")[:-1]


def render(record: Record) -> bytes:
    """Return one line, without its end. Raises: one of `protocol.NOT_ENCODABLE`."""
    seq, t, item = record.seq, record.time, record.event or record.action
    if item is not None:
        (line,) = render_all(parts_of(seq, t, record.cause, item))
    elif record.start is not None:
        begin, rest = _encoder.encode(_StartHead(seq, t)), _encoder.encode(record.start)
        line = begin[:-1] + b"," + rest[1:]
    else:
        line = _encoder.encode(_Dropped(seq, t, "dropped", record.dropped))
    return line


def began(head: bytes, otherwise: float) -> float:
    """Return the time in the beginning of a line, if it is there."""
    found = _TIME.match(head)
    return float(found[1]) if found else otherwise


def missed(before: bytes, count: int) -> bytes:
    """Return a line that tells a reader that it missed `count` records before the line `before`."""
    following = _begin(before)
    return _encoder.encode(_Dropped(following.seq, following.t, "dropped", count))


def parse(line: bytes | str) -> Record:
    """Raises: SchemaMismatch; msgspec.MsgspecError, ValueError or RecursionError for a line that is
    no record."""
    head = _begin(line)
    seq, cause, time = head.seq, head.cause, head.t
    match head.type:
        case "event" if decoder := _REQUESTS.get(head.kind):
            first = _asked_head(line)
            asked = SessionRequest(first.now, first.session, decoder.decode(line))
            return Record(seq, cause, time, event=asked)
        case "event":
            return Record(seq, cause, time, event=_known(_EVENTS, head.kind).decode(line))
        case "action":
            return Record(seq, cause, time, action=_known(_ACTIONS, head.kind).decode(line))
        case "dropped":
            return Record(seq, cause, time, dropped=head.count)
        case "start":
            if head.schema != SCHEMA:
                raise SchemaMismatch(head.schema)
            return Record(seq, cause, time, start=_start(line))


def _known(kinds: dict[str, msgspec.json.Decoder[Any]], kind: str) -> msgspec.json.Decoder[Any]:
    if kind not in kinds:
        raise msgspec.ValidationError(f"no kind of record: {kind!r}")
    return kinds[kind]
