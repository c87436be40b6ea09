"""What we write, the official reader reads."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.checkpoint.index import INDEX_NAME, Checkpoint
from colibri.checkpoint.safetensors import read_header, read_tensor
from colibri.checkpoint.safetensors_writer import (
    Entry,
    Pending,
    encode_header,
    save_hf,
    write_json,
    write_safetensors,
)
from colibri.formats import BF16

TENSORS = {
    f"layer.{i}": np.random.default_rng(i).standard_normal((3, i + 1), np.float32) for i in range(7)
}


@pytest.mark.parametrize("shards", [1, 2, 5, 20])
def test_the_official_reader_finds_the_same_numbers(shards: int, tmp_path: Path) -> None:
    save_hf(tmp_path, {"a": 1}, TENSORS, shards=shards)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == min(shards, len(TENSORS))
    found = {n: t for path in files for n, t in safetensors.numpy.load_file(path).items()}
    assert found.keys() == TENSORS.keys()
    assert all((found[name] == values).all() for name, values in TENSORS.items())
    assert (tmp_path / INDEX_NAME).exists() == (shards > 1)
    assert Checkpoint.open(tmp_path).tensors.keys() == TENSORS.keys()
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_floats_are_rounded_to_the_dtype(dtype: str, tmp_path: Path) -> None:
    save_hf(tmp_path, {}, TENSORS, dtype=dtype)
    for name, values in TENSORS.items():
        spec = Checkpoint.open(tmp_path).tensors[name]
        wanted = {
            "F32": values,
            "F16": values.astype(np.float16),
            "BF16": BF16.from_float32(values),
        }[dtype]
        assert (spec.dtype, spec.shape) == (dtype, values.shape)
        assert read_tensor(spec).tobytes() == wanted.tobytes()


def test_wide_types_come_first(tmp_path: Path) -> None:
    odd, wide = Entry("odd", "U8", (3,), 3), Entry("wide", "F32", (2,), 8)
    tensors = [
        Pending(odd, lambda: [np.arange(3, dtype=np.uint8)]),
        Pending(wide, lambda: [np.zeros(4, np.uint8), np.ones(4, np.uint8)]),  # in two pieces
    ]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    header = read_header(tmp_path / "model.safetensors")
    assert list(header) == ["wide", "odd"]
    assert header["wide"].offset % 4 == 0
    assert read_tensor(header["wide"]).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@settings(max_examples=50, deadline=None)
@given(
    names=st.lists(st.text(min_size=1, max_size=20), unique=True, max_size=30),
    align=st.sampled_from([8, 64, 4096]),
    pages=st.integers(0, 3),
)
def test_data_starts_where_it_was_asked_to(names: list[str], align: int, pages: int) -> None:
    entries = [Entry(name, "U8", (5,), 5) for name in names if name != "__metadata__"]
    header = encode_header(entries, align=align, room=pages * 4096)
    assert len(header) % align == 0
    assert len(header) >= pages * 4096
    found = json.loads(header[8:])
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert [name for name in found if name != "__metadata__"] == [e.name for e in entries]


def test_a_tensor_that_cannot_be_made_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> list[np.ndarray]:
        raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        write_safetensors(tmp_path / "m.safetensors", [Pending(Entry("a", "U8", (1,), 1), fail)])
    assert not (tmp_path / "m.safetensors").exists()


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"new": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}
