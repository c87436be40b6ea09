"""Formats are found by name, and their numbers in the native ABI never collide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.errors import UnsupportedModelError
from colibri.formats import (
    BF16,
    F16,
    F32,
    FORMATS,
    FP8_B16,
    FP8_B32,
    FP8_B64,
    FP8_B128,
    get_format,
    padded,
)


def test_names_and_codes() -> None:
    assert list(FORMATS) == [
        "f32",
        "f16",
        "bf16",
        *(f"fp8-e4m3-b{block}" for block in (128, 64, 32, 16)),
        *(f"int{bits}-g{group}" for bits in (8, 4) for group in (32, 64, 128)),
        *(f"int4-g{group}-bf16" for group in (32, 64, 128)),
        "mxfp4",
        "q4_k",
        "q6_k",
        "int8-g32-affine",
        "int8-g16-affine",
    ]
    assert all(get_format(name) is fmt and repr(fmt) == name for name, fmt in FORMATS.items())
    assert len({fmt.code for fmt in FORMATS.values()}) == len(FORMATS)


def test_only_integers_are_coded() -> None:
    floats = [F32, F16, BF16, FP8_B128, FP8_B64, FP8_B32, FP8_B16]
    assert [fmt for fmt in FORMATS.values() if not fmt.is_coded] == floats
    groups = {name: fmt.group for name, fmt in FORMATS.items() if fmt.is_coded}
    assert [groups.pop(name) for name in ("mxfp4", "q4_k", "q6_k")] == [32, 32, 16]
    assert all(int(name.split("-")[1][1:]) == group for name, group in groups.items())


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
