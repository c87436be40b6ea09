"""Quantities survive the way from text to number and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.units import format_bytes, format_bytes_up, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        (4096, 4096),
        ("1073741824", 2**30),
        ("12GiB", 12 * 2**30),
        ("12 gib", 12 * 2**30),
        ("12G", 12 * 2**30),
        ("12GB", 12 * 10**9),
        ("800MB", 800 * 10**6),
        ("800m", 800 * 2**20),
        ("1.5g", 3 * 2**29),
        ("0.5k", 512),
        (" 2 TiB ", 2**41),
        ("7b", 7),
    ],
)
def test_parse_bytes(text: str | int, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "text", ["", "big", "-1", "1e9", "1,5G", "12 GG", "12GiBs", "GiB", ".5G", "nan", 0, -4, "0MB"]
)
def test_what_is_no_size_is_refused_by_name(text: str | int) -> None:
    with pytest.raises(ValueError, match="is not a size") as refusal:
        parse_bytes(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-2048, "-2.0 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (2**30, "1.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_format_bytes(value: int, text: str) -> None:
    assert format_bytes(value) == text


@given(st.integers(1, 2**46))
def test_rounding_up_never_promises_too_little(value: int) -> None:
    read_back = parse_bytes(format_bytes_up(value))
    assert value <= read_back <= value + value // 10 + 1


@pytest.mark.parametrize(
    ("value", "text"), [(1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1025, "1.1 KiB")]
)
def test_format_bytes_up(value: int, text: str) -> None:
    assert format_bytes_up(value) == text


@given(st.integers(1, 2**46))
def test_printed_bytes_are_near(value: int) -> None:
    assert parse_bytes(format_bytes(value)) == pytest.approx(value, rel=0.05)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00 s"),
        (0.424, "0.42 s"),
        (60, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3720, "1 h 02 min"),
        (90061, "25 h 01 min"),
    ],
)
def test_format_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text
