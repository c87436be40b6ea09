"""Broken headers, one for each way to break one, then random damage: only typed errors."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.checkpoint.safetensors import read_header
from colibri.errors import CheckpointError, IncompleteModelError
from tests.unit.checkpoint.files import entries, raw_file

TENSORS = {"first": np.arange(8, dtype="<f4").reshape(2, 4), "second": np.arange(6, dtype="<u2")}
DATA = b"".join(array.tobytes() for array in TENSORS.values())  # 32 + 12 bytes
GOOD = raw_file(entries(TENSORS), DATA)


def changed(name: str = "second", **fields: Any) -> bytes:
    """The good file with other fields in one entry."""
    header = entries(TENSORS)
    header[name] |= fields
    return raw_file(header, DATA)


def text(old: str, new: str) -> bytes:
    """The good file with another header text."""
    header = json.dumps(entries(TENSORS))
    assert old in header
    return raw_file(header.replace(old, new, 1).encode(), DATA)


VALID = {
    "as it is": GOOD,
    "trailing blanks": raw_file(json.dumps(entries(TENSORS)).encode() + b" " * 37, DATA),
    "no elements": raw_file({"x": {"dtype": "F32", "shape": [0, 8], "data_offsets": [0, 0]}}),
    "no extents": raw_file({"x": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, bytes(4)),
    "no tensors": raw_file({}),
}

# What is broken: the file, and what the message must name besides it.
BROKEN = {
    "no bytes": (b"", "header"),
    "seven bytes": (GOOD[:7], "header"),
    "length 0": (raw_file(b"", b"", 0), "length"),
    "length 2^63": (raw_file(b"{}", b"", 2**63), "length"),
    "length 2^64 - 1": (raw_file(b"{}", b"", 2**64 - 1), "length"),
    "length over the limit": (raw_file(b"{}", b"", 100_000_001), "length"),
    "length beyond the file": (raw_file(b"{}", b"", 3), "cut off"),
    "length of the whole file": (raw_file(b"{}", b"", 10), "cut off"),
    "NUL padding": (raw_file(json.dumps(entries(TENSORS)).encode() + b"\0" * 8, DATA), "JSON"),
    "blank first": (raw_file(b" " + json.dumps(entries(TENSORS)).encode(), DATA), "header"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "JSON"),
    "a list": (raw_file(b"[]"), "'{'"),
    "unquoted key": (text('"second"', "second"), "JSON"),
    "nested too deeply": (raw_file(b'{"a":' * 50_000), "nested"),
    "a number without end": (raw_file(b'{"a":' + b"9" * 5000 + b"}"), "JSON"),
    "the same tensor twice": (text('"second"', '"first"'), "'first'"),
    "the same field twice": (text('"dtype": "BF16"', '"dtype": "BF16", "dtype": "F16"'), "'dtype'"),
    "no dtype": (text('"dtype": "BF16", ', ""), "'second'"),
    "a field too many": (changed(stride=[1]), "'second'"),
    "an entry that is a list": (raw_file({"x": []}), "'x'"),
    "an entry that is null": (raw_file({"x": None}), "'x'"),
    "unknown dtype": (changed(dtype="F31"), "'second'.*F31"),
    "unknown dtype and offsets": (changed(dtype="F31", data_offsets=[2**40, 2**41]), "'second'"),
    "dtype that is a list": (changed(dtype=["F16"]), "'second'"),
    "reversed": (changed(data_offsets=[44, 32]), "'second'"),
    "negative begin": (changed("first", data_offsets=[-4, 28]), "'first'"),
    "negative extent": (changed(shape=[-6]), "'second'"),
    "two negative extents": (changed(shape=[-2, -3]), "'second'"),
    "one byte too far": (changed(dtype="U8", shape=[13], data_offsets=[32, 45]), "'second'.*cut"),
    "far outside": (changed(data_offsets=[2**40, 2**40 + 12]), "'second'.*hole"),
    "bytes and shape": (changed(shape=[7]), "'second'.*14 bytes.*"),
    "bytes and dtype": (changed(dtype="F32"), "'second'.*24 bytes"),
    "half a byte": (changed(dtype="F4", shape=[23]), "'second'.*11.5"),
    "an overflowing shape": (changed(shape=[2**33, 2**33]), "'second'"),
    "a shape that wraps to its size": (changed(shape=[2**62, 4, 6]), "'second'"),
    "an extent beyond 2^63": (changed(shape=[0, 2**63]), "'second'"),
    "a float extent": (changed(shape=[6.0]), "'second'"),
    "a true extent": (changed(shape=[6, True]), "'second'"),
    "a NaN extent": (text("[6]", "[NaN]"), "NaN"),
    "too many extents": (changed(shape=[1] * 32 + [6]), "'second'"),
    "three offsets": (changed(data_offsets=[32, 44, 44]), "'second'"),
    "offsets of text": (changed(data_offsets=["32", "44"]), "'second'"),
    "overlap": (changed(dtype="U8", shape=[16], data_offsets=[28, 44]), "'second'.*overlap"),
    "the same bytes twice": (changed("first", shape=[3], data_offsets=[32, 44]), "overlap|hole"),
    "a hole": (changed(shape=[5], data_offsets=[34, 44]), "'second'.*hole"),
    "a hole at the start": (changed("first", shape=[7], data_offsets=[4, 32]), "'first'.*hole"),
    "trailing bytes": (GOOD + b"\0", "1 bytes that belong to no tensor"),
    "metadata of numbers": (raw_file({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata that is null": (raw_file({"__metadata__": None}), "__metadata__"),
    "metadata that is a list": (raw_file({"__metadata__": ["a"]}), "__metadata__"),
    "an LFS pointer": (b"version https://lfs.invalid/spec/v1\noid sha256:0\nsize 9\n", "git lfs"),
}


@pytest.mark.parametrize("case", VALID)
def test_unusual_but_valid(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(VALID[case])
    assert all(spec.file == path for spec in read_header(path).values())


@pytest.mark.parametrize("case", BROKEN)
def test_broken_header(case: str, tmp_path: Path) -> None:
    content, named = BROKEN[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=named) as caught:
        read_header(path)
    message = str(caught.value)
    assert str(path) in message
    assert len(message) < 1000


@pytest.mark.parametrize("end", range(len(GOOD)))
def test_cut_anywhere(end: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD[:end])
    with pytest.raises(IncompleteModelError):
        read_header(path)


DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete"]),
        st.integers(0, len(GOOD) - 1),
        st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from([b"-", b"9", b"[", b'"'])),
    ),
    min_size=1,
    max_size=4,
)


def damaged(content: bytes, damage: list[tuple[str, int, bytes]]) -> bytes:
    """`content` after some edits."""
    for kind, at, new in damage:
        skipped = 0 if kind == "insert" else len(new)
        content = content[:at] + (b"" if kind == "delete" else new) + content[at + skipped :]
    return content


@given(damage=DAMAGE, keep_length=st.booleans())
def test_random_damage(
    damage: list[tuple[str, int, bytes]],
    keep_length: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    content = damaged(GOOD, damage)
    if keep_length:  # then the damage reaches the JSON, not only the length before it
        content = GOOD[:8] + content[8:]
    check_survives(content, tmp_path_factory.mktemp("files") / "x.safetensors")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(
    field=st.sampled_from(["dtype", "shape", "data_offsets", "other"]),
    value=JSON | st.lists(st.integers(-(2**65), 2**65), max_size=4),
)
def test_any_value_in_any_field(
    field: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    check_survives(changed(**{field: value}), path)


def check_survives(content: bytes, path: Path) -> None:
    """A header is refused by name or holds what it says; either way it takes little memory."""
    path.write_bytes(content)
    message, specs = str(path), {}
    tracemalloc.start()
    try:
        specs = read_header(path)
    except CheckpointError as problem:
        message = str(problem)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(path) in message
    assert all(spec.offset + spec.nbytes <= len(content) for spec in specs.values())
    assert peak < 2**20
