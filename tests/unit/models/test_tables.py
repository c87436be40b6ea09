"""Tables that stay on disk: in one tensor or in shards, planned, counted, never loaded."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colibri import LLM
from colibri.checkpoint.index import Checkpoint
from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.models import convert, qwen4_exp
from colibri.models.convert import convert_model
from colibri.models.description import Description
from tests.tiny import write_tiny

STEM = "model.layers.0.ple.ple_embedding.ngram_embedding."
PROMPT = np.array([5, 9, 2, 77, 401, 9, 5, 9], np.int32)


def sharded(directory: Path, *heights: int, dtype: type = np.float32) -> Path:
    """The tiny model, the first table in shards of these heights (-1: all that is left)."""
    path = write_tiny(directory, qwen4_exp.FAMILY, shards=1)
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    table, first = tensors.pop(f"{STEM}weight"), 0
    for number, height in enumerate(heights):
        end = len(table) if height < 0 else first + height
        tensors[f"{STEM}shard_{number}.weight"] = table[first:end].astype(dtype)
        dtype, first = np.float32, end
    save_file(tensors, file)
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    return path


def logits(path: Path) -> np.ndarray:
    with LLM.open(path, expert_slots="100%", activations="float32", kv="f32") as llm:
        return llm.logits(PROMPT)


def test_shards_are_one_table_and_conversion_keeps_them(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "whole", qwen4_exp.FAMILY)
    parts = sharded(tmp_path / "parts", 100, 7, -1)
    wanted = logits(whole)
    np.testing.assert_array_equal(logits(parts), wanted)
    convert_model(parts, tmp_path / "container", experts=None)
    np.testing.assert_array_equal(logits(tmp_path / "container"), wanted)


@pytest.mark.parametrize("heights", [(-1,), (100, 7, -1), (0, 416)])
def test_conversion_holds_no_more_than_a_shard_of_a_table(
    heights: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = sharded(tmp_path / "parts", *heights)
    monkeypatch.setattr(convert, "_SHARD_BYTES", 33 * 48)
    convert_model(parts, tmp_path / "to", experts=None)
    tables = Description.of(Checkpoint.open(tmp_path / "to")).tables
    assert all(shard.nbytes <= 33 * 48 for table in tables for shard in table.shards)
    np.testing.assert_array_equal(logits(tmp_path / "to"), logits(parts))


def test_tables_are_planned_and_counted_but_not_loaded(tmp_path: Path) -> None:
    path = sharded(tmp_path, 100, -1)
    description = Description.of(Checkpoint.open(path))
    first, second = description.tables
    assert [len(table.shards) for table in description.tables] == [2, 1]
    assert first.nbytes + second.nbytes == 4 * 12 * (416 + 480)
    assert not [t for t in description.dense if "ngram_embedding" in t.parameter.name]
    with LLM.open(path) as llm:
        plan = llm.plan()
        assert plan.table_bytes == first.nbytes + second.nbytes
        assert plan.table_bytes_per_token == 2 * 4 * 4 * 12
        llm.generate(PROMPT[:1], max_tokens=1, temperature=0, ignore_eos=True)
        counted = llm.metrics().experts.table_bytes
        assert counted == plan.table_bytes_per_token


@pytest.mark.parametrize("heights", [(100,), (100, 7)])
def test_shards_that_are_not_the_table_are_refused(
    heights: tuple[int, ...], tmp_path: Path
) -> None:
    path = sharded(tmp_path, *heights)
    with pytest.raises(CheckpointError, match=rf"the {len(heights)} shards of .* wanted 416"):
        Description.of(Checkpoint.open(path))


def test_shards_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    path = sharded(tmp_path, 100, -1, dtype=np.float16)
    with pytest.raises(UnsupportedModelError, match="have different dtypes"):
        Description.of(Checkpoint.open(path))
