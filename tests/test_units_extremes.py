"""Figures for people never show an exponent, even if they are large or odd."""

import pytest

from swapd.shared.units import seconds, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 us"),
        (0.0009999, "1 ms"),
        (0.9999, "1 s"),
        (3.1234, "3.12 s"),
        (7199, "120 min"),
        (86_400, "24 h"),
        (30 * 86_400, "30 days"),
        (2315 * 86_400, "2315 days"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1023, "1023 B"),
        (1 << 30, "1 GiB"),
        (20_000 << 30, "19.53 TiB"),
        (50_000 << 40, "50000 TiB"),
    ],
)
def test_size(value: int, text: str) -> None:
    assert size(value) == text
