"""Frames from the protocol's types: every message, valid, nearly valid, and damaged. Pure."""

import random
from collections.abc import Sequence
from types import UnionType
from typing import Any

import msgspec
from msgspec import inspect

NUMBERS = (
    *(0, 1, 2, 3, 7, 255, 256, 4096, 1 << 20, 2 << 20, 3 << 20, 16 << 20, 1 << 30),
    *((1 << n) - d for n in (15, 16, 31, 32, 40, 53, 62, 63, 64) for d in (0, 1)),
)
FLOATS = (0.0, 1e-9, 0.5, 3.0, -1.0, 1e18, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *("", " ", "x", "rest", "x/rest", "//", "../x", "\0", "\x1b[31m", "a\nb", "\u202egnp", "é" * 9),
    *("x" * 199, "x" * 200, "x" * 201, "x" * 70_000, "%s%n", "\U0010ffff", "-" * 3),
)


class Frames:
    """A stream of frames for one of the protocol's unions, the same for the same seed."""

    def __init__(self, messages: UnionType, names: Sequence[str], seed: int) -> None:
        """`names`: existing components, which many of the messages name."""
        kinds = inspect.type_info(messages)
        assert isinstance(kinds, inspect.UnionType)
        self._kinds = [kind for kind in kinds.types if isinstance(kind, inspect.StructType)]
        self._names = tuple(names)
        self._random = random.Random(seed)

    def next(self) -> bytes:
        """One frame: a third are valid, a third have wrong values, a third are damaged."""
        r = self._random
        how = r.random()
        fields = self._message(r.choice(self._kinds))
        if how > 1 / 3:
            self._spoil(fields)
        data = _encode(fields)
        if how > 2 / 3:
            data = self._damaged(data)
        return data

    # --- by the shape --------------------------------------------------------------------

    def _message(self, kind: inspect.StructType) -> dict[str, Any]:
        fields: dict[str, Any] = {str(kind.tag_field): kind.tag}
        for field in kind.fields:
            if field.required or self._random.random() < 0.6:
                fields[field.encode_name] = self._value(field.type)
        return fields

    def _value(self, kind: inspect.Type) -> Any:
        r = self._random
        match kind:
            case inspect.BoolType():
                return r.random() < 0.5
            case inspect.IntType():
                return r.choice(NUMBERS) if r.random() < 0.3 else r.randrange(64)
            case inspect.FloatType():
                return r.choice(FLOATS)
            case inspect.StrType():
                return r.choice(self._names) if r.random() < 0.7 else r.choice(TEXTS)
            case inspect.BytesType():
                return r.randbytes(r.randrange(64))
            case inspect.LiteralType():
                return r.choice(kind.values)
            case inspect.UnionType():
                return self._value(r.choice(kind.types))
            case inspect.VarTupleType() | inspect.ListType():
                return [self._value(kind.item_type) for _ in range(r.choice((0, 1, 1, 2, 3, 40)))]
            case inspect.TupleType():
                return [self._value(item) for item in kind.item_types]
        return None

    # --- wrong values --------------------------------------------------------------------

    def _spoil(self, fields: dict[str, Any]) -> None:
        r = self._random
        for _ in range(r.choice((1, 1, 1, 2, 4))):
            key = r.choice([*fields, "unknown"])
            if r.random() < 0.15:
                fields.pop(key, None)
            else:
                fields[key] = self._anything()

    def _anything(self) -> Any:
        r = self._random
        match r.randrange(8):
            case 0:
                return r.choice(NUMBERS) * r.choice((1, -1))
            case 1:
                return r.choice(FLOATS)
            case 2:
                return r.choice(TEXTS)
            case 3:
                return r.randbytes(r.choice((0, 1, 16, 5000)))
            case 4:
                return [self._anything() for _ in range(r.choice((0, 1, 3)))]
            case 5:
                return {r.choice(TEXTS): r.choice(NUMBERS) for _ in range(r.choice((0, 1, 3)))}
            case 6:
                return [r.choice(self._names)] * r.choice((2, 1024, 1025))
        return r.choice((None, True, False))

    # --- damaged bytes -------------------------------------------------------------------

    def _damaged(self, data: bytes) -> bytes:
        r = self._random
        match r.randrange(8):
            case 0:
                return data[: r.randrange(len(data) + 1)]
            case 1:
                return data + r.randbytes(r.choice((1, 9, 300)))
            case 2:
                at = r.randrange(len(data))
                return data[:at] + r.randbytes(r.choice((0, 1, 4))) + data[at + r.randrange(5) :]
            case 3:
                return data * 2
            case 4:
                return b"\x91" * r.choice((10, 1000, 60_000)) + data  # nested lists
            case 5:
                return (
                    r.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6")) + b"\xff" * 4 + data
                )  # claims 2**32 items
            case 6:
                return r.randbytes(r.choice((0, 1, 2, 100, 4000)))
        flipped = bytearray(data)
        for _ in range(r.choice((1, 1, 2, 8))):
            flipped[r.randrange(len(flipped))] ^= 1 << r.randrange(8)
        return bytes(flipped)


def _encode(fields: dict[str, Any]) -> bytes:
    """As msgpack, with numbers of more than 64 bits cut to 64."""
    return msgspec.msgpack.encode(_cut(fields))


def _cut(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-(1 << 63), min(value, (1 << 64) - 1))
    if isinstance(value, dict):
        return {key: _cut(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cut(item) for item in value]
    return value
