"""Tensors that are knowingly not used are counted, and said."""

import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colibri import LLM
from colibri.checkpoint.index import Checkpoint
from colibri.models import qwen3_5_moe
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
    assert description.left_aside == {"model.visual": 2, "mtp": 1}
    with caplog.at_level(logging.WARNING), LLM.open(path, kernels="reference"):
        pass
    said = [text for text in caplog.messages if "not read" in text]
    what = "model.visual (2 tensors), mtp (1 tensor)"
    assert said == [f"tensors that this model does without are not read: {what}"]
