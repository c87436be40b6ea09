"""Formats are found by name, and their numbers in the native ABI never collide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.errors import UnsupportedModelError
from colibri.formats import BF16, F16, F32, FORMATS, get_format, padded


def test_names_and_codes() -> None:
    assert list(FORMATS) == [
        "f32",
        "f16",
        "bf16",
        *(f"int{bits}-g{group}" for bits in (8, 4) for group in (32, 64, 128)),
    ]
    assert all(get_format(name) is fmt and repr(fmt) == name for name, fmt in FORMATS.items())
    assert len({fmt.code for fmt in FORMATS.values()}) == len(FORMATS)


def test_only_integers_are_coded() -> None:
    assert [fmt for fmt in FORMATS.values() if not fmt.is_coded] == [F32, F16, BF16]
    assert all(int(name.split("g")[-1]) == f.group for name, f in FORMATS.items() if f.is_coded)


@pytest.mark.parametrize(
    ("name", "near"), [("int4_g64", "'int4-g64'"), ("bf-16", "'bf16'"), ("zzz", "")]
)
def test_unknown_name(name: str, near: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        get_format(name)
    message = str(refusal.value)
    assert repr(name) in message
    assert f"did you mean {near}" in message if near else "did you mean" not in message
    assert all(known in message for known in FORMATS)


@given(st.integers(0, 10**6), st.integers(1, 4096))
def test_padded(count: int, multiple: int) -> None:
    found = padded(count, multiple)
    assert found % multiple == 0
    assert count <= found < count + multiple
