"""Bytes and rates as people write them: 40GiB, 512MB, 12GB/s."""

import re

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
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in `text`: "1GiB" is 1073741824, "12GB" is 12000000000, "4096" is itself."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 40GiB, 512MiB or 12GB")
    return int(float(match[1]) * _FACTORS[(match[2] or "").lower()])


def parse_rate(text: str) -> float:
    """Bytes per second in `text`, as in 12GB/s."""
    number, slash, unit = text.partition("/")
    if slash and unit.strip() != "s":
        raise ValueError(f"{text!r} is not a rate; write it like 12GB/s")
    rate = parse_size(number)
    if rate <= 0:
        raise ValueError(f"{text!r} is no rate at all; write it like 12GB/s")
    return float(rate)


def size(nbytes: float) -> str:
    """`nbytes` for people, binary units: 1.5 GiB, 256 MiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes:.0f} B"


def seconds(value: float) -> str:
    """A time span for people: 14.2 ms, 3.1 s, 5 min."""
    if value < 0.001:
        return f"{value * 1e6:.3g} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min"
