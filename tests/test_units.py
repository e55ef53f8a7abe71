"""Sizes and rates: swapd reads people's input exactly, and can read its own output."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapd.shared.units import parse_rate, parse_size, seconds, size, typed_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("1k", 1000),
        ("1KiB", 1024),
        ("12GB", 12 * 10**9),
        ("12gb", 12 * 10**9),
        ("1.5GiB", 3 << 29),
        ("40 GiB", 40 << 30),
        (" 2TiB ", 2 << 40),
        ("0.1GB", 10**8),
    ],
)
def test_sizes_are_read_in_both_kinds_of_units(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", " ", "GiB", "-1GiB", "1.GiB", ".5GiB", "1e9", "1 G i B", "1PiB", "1GiB/s", "nan"]
)
def test_what_is_no_size_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="40GiB") as refused:
        parse_size(text)
    assert repr(text) in str(refused.value)


@settings(deadline=None)
@given(st.integers(0, 1 << 80))
def test_a_plain_number_is_itself(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes


@settings(deadline=None)
@given(st.text(alphabet="0123456789.kmgtiKMGTIbB /se-+", max_size=400))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    for parse in (parse_size, parse_rate):
        with suppress(ValueError):
            assert parse(text) >= 0


@pytest.mark.parametrize(
    ("text", "rate"), [("12GB/s", 12e9), ("12GB", 12e9), ("512 MiB / s", float(512 << 20))]
)
def test_rates_are_sizes_each_second(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["12GB/min", "12GB/", "0GB/s", "0.1B/s", "fast"])
def test_what_is_no_rate_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it like") as refused:
        parse_rate(text)
    assert text.partition("/")[0] in str(refused.value)


def test_a_rate_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ValueError, match="is no rate"):
        parse_rate("9" * 400)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (256 << 20, "256 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1 TiB"),
        (20_000 << 30, "19.53 TiB"),
        (50_000 << 40, "50000 TiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@settings(deadline=None)
@given(st.floats(0, 2.0**70))
def test_a_shown_size_reads_back_as_nearly_itself(nbytes: float) -> None:
    assert parse_size(size(nbytes)) == pytest.approx(nbytes, rel=1e-3, abs=1)


@settings(deadline=None)
@given(st.floats(0, 1e12))
def test_a_shown_time_has_no_exponent(value: float) -> None:
    number, unit = seconds(value).split(" ")
    assert "e" not in number or value < 1e-9
    assert unit in ("us", "ms", "s", "min", "h", "days")


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("40GB", "40 GB"),
        ("40 gb", "40 GB"),
        ("0.5GiB", "0.5 GiB"),
        ("1024MiB", "1024 MiB"),
        ("7k", "7 kB"),
        ("1048576", "1 MiB"),
    ],
)
def test_what_was_typed_is_shown_as_it_was_typed(typed: str, shown: str) -> None:
    assert size(typed_size(typed)) == shown
    assert typed_size(typed) == parse_size(typed)
    assert parse_size(shown) == parse_size(typed)
    assert size(typed_size(typed) + 0) == size(parse_size(typed))  # no longer the typed text


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
def test_times_are_shown_without_an_exponent(value: float, text: str) -> None:
    assert seconds(value) == text
