"""Tensors that are knowingly not used are counted, and said."""

import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colibri import LLM
from colibri.checkpoint.index import Checkpoint
from colibri.cli.convert import as_json, summary
from colibri.models import glm4_moe, qwen3_5_moe, qwen4_exp
from colibri.models.convert import convert_model
from colibri.models.description import Description
from tests.tiny import write_tiny


def test_what_is_not_used_is_counted_by_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Vision towers and drafting heads are left aside, and that is said."""
    path = write_tiny(tmp_path, qwen3_5_moe.FAMILY, shards=1)
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    zeros = np.zeros(4, np.float32)
    extra = {"model.visual.a.bias": zeros, "model.visual.b.bias": zeros, "mtp.norm.weight": zeros}
    save_file(tensors | extra, file)
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    description = Description.of(Checkpoint.open(path))
    assert description.left_aside == {"model.visual": 2, "drafting heads": 1}
    with caplog.at_level(logging.WARNING), LLM.open(path, kernels="reference"):
        pass
    said = [text for text in caplog.messages if "not read" in text]
    what = "model.visual (2 tensors), drafting heads (1 tensor)"
    assert said == [f"tensors that this model does without are not read: {what}"]


def test_tensors_of_layers_are_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, qwen4_exp.FAMILY, shards=1)
    file = next(path.glob("*.safetensors"))
    name = "model.layers.{}.ple.ple_embedding.layer_multipliers"
    save_file(load_file(file) | {name.format(i): np.zeros(4, np.float32) for i in range(2)}, file)
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    assert Description.of(Checkpoint.open(path)).left_aside == {name.format("*"): 2}


def test_conversion_says_that_drafting_heads_do_not_come_along(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "from", glm4_moe.FAMILY, heads=2)
    report = convert_model(path, tmp_path / "to", experts=None, mtp="none")
    counts = {"drafting heads": len(Description.of(Checkpoint.open(path)).ignored)}
    assert report.left_aside == as_json(report)["left_aside"] == counts
    assert f"drafting heads ({counts['drafting heads']} tensors)" in summary(report)
