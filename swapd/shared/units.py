"""Parses and prints bytes, rates and time spans: 40GiB, 512MB, 12GB/s, 10m."""

import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

_FACTORS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_UNITS = {"k": "kB", "m": "MB", "g": "GB", "t": "TB"} | {f"{u}i": f"{u.upper()}iB" for u in "kmgt"}
#: Most digits of a number: it can still be printed in full with the largest unit.
_DIGITS_MAX = 25
_SPANS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "days": 86400.0,
    "d": 86400.0,
}
_SPAN = re.compile(rf"\s*([0-9]+(?:\.[0-9]+)?)\s*({'|'.join(_SPANS)})?\s*")
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


class Size(int):
    """Bytes that `size` prints as they were typed.

    Arithmetic gives a plain `int`. msgspec encodes no subclass of `int`: pass `int(...)` to a
    message.
    """

    text: str

    def __new__(cls, nbytes: int, text: str) -> "Size":
        made = super().__new__(cls, nbytes)
        made.text = text
        return made


def typed_size(text: str) -> Size:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 40GiB, 512MiB or 12GB")
    if len(match[1]) > _DIGITS_MAX:
        raise ValueError(f"{match[1][:_DIGITS_MAX]}... is more than any machine has")
    unit = (match[2] or "").lower()
    nbytes = int(Fraction(match[1]) * _FACTORS[unit])
    return Size(nbytes, f"{match[1]} {_UNITS[unit]}" if unit else size(nbytes))


def parse_size(text: str) -> int:
    """Return bytes: "1GiB" is 1073741824, "12GB" is 12000000000, "4096" is 4096."""
    return int(typed_size(text))


def parse_span(text: str) -> float:
    """Return seconds, from "50ms", "10m" (minutes), "1.5h" or "7d"; a bare number is seconds."""
    match = _SPAN.fullmatch(text)
    if match is None or len(match[1]) > _DIGITS_MAX:
        raise ValueError(
            f"{text[:80]!r} is not a time span; write it like 50ms, 30s, 10m, 2h or 7d"
        )
    return float(match[1]) * _SPANS[match[2] or "s"]


def parse_rate(text: str) -> float:
    """Return bytes per second, from "12GB/s"."""
    number, slash, unit = text.partition("/")
    if slash and unit.strip() != "s":
        raise ValueError(f"{text!r} is not a rate; write it like 12GB/s")
    rate = parse_size(number) if len(number) <= 2 * _DIGITS_MAX else 0
    if not 0 < rate < 1 << 64:
        raise ValueError(f"{text!r} is no rate at all; write it like 12GB/s")
    return float(rate)


def size(nbytes: float) -> str:
    """Return bytes for people, in binary units: 1.5 GiB, 256 MiB. A `Size` prints as typed."""
    return nbytes.text if isinstance(nbytes, Size) else _binary(nbytes)


@lru_cache  # the records of the swap log repeat a few sizes
def _binary(nbytes: float) -> str:
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{_digits(nbytes / factor, 4)} {unit}"
    return f"{nbytes:.0f} B"


def seconds(value: float) -> str:
    """Return a time span for people: 14.2 ms, 3.1 s, 5 min, 2.5 days."""
    for unit, factor, limit in (
        ("us", 1e-6, 0.9995e-3),
        ("ms", 1e-3, 0.9995),
        ("s", 1.0, 120.0),
        ("min", 60.0, 7200.0),
        ("h", 3600.0, 172800.0),
    ):
        if value < limit:
            return f"{_digits(value / factor, 3)} {unit}"
    return f"{_digits(value / 86400, 3)} days"


class _Loaded(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def copy_s(self) -> float | None: ...


def measured_loads(components: Iterable[_Loaded]) -> tuple[float, int] | None:
    """Return the mean bytes per second of each component's last load, and how many had one; None if
    none had. Scratch does not count, as it may have been loaded in part."""
    loaded = [c for c in components if c.kind == "component" and c.nbytes and c.copy_s]
    took_s = sum(c.copy_s or 0.0 for c in loaded)
    return (sum(c.nbytes for c in loaded) / took_s, len(loaded)) if loaded else None


def rate(bytes_per_s: float) -> str:
    """Return a transfer rate for people, in decimal units: 12.3 GB/s."""
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= factor:
            return f"{_digits(bytes_per_s / factor, 3)} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def _digits(value: float, digits: int) -> str:
    """Use no exponent, as `g` alone would for 1234 days."""
    return f"{value:.0f}" if value >= 10**digits - 0.5 else f"{value:.{digits}g}"
