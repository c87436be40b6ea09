"""What a GGUF file's metadata become: the config that a model of Hugging Face's would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri.checkpoint.index import Checkpoint
from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.models.gguf import adopted, model_config
from colibri.models.registry import all_families
from tests.gguf_files import write_file

BASE: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
}
TENSORS = {"token_embd.weight": np.zeros((7, 32), np.float32)}


def config(path: Path, keys: dict[str, Any], tensors: dict[str, Any] | None = None) -> Any:
    given = {key: value for key, value in {**BASE, **keys}.items() if value is not None}
    return model_config(write_file(path / "m.gguf", "llama", given, {**TENSORS, **(tensors or {})}))


def test_numbers_are_what_was_written(tmp_path: Path) -> None:
    """Files hold float32: the shortest decimal that stands for it is what a config said."""
    found = config(tmp_path, {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eot_token_id": 5})
    assert found["rms_norm_eps"] == 1e-5
    assert found["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert found["vocab_size"] == 7
    assert found["tie_word_embeddings"] is True
    assert found["rope_interleave"] is True
    assert (found["bos_token_id"], found["eos_token_id"]) == (1, [5])


def test_frequencies_with_divisors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    found = config(tmp_path, {}, {"rope_freqs.weight": factors})
    assert found["rope_parameters"]["rope_type"] == "factors"
    assert found["rope_parameters"]["frequency_factors"] == factors.tolist()


def test_divisors_beside_another_scaling_are_refused(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight': wanted .* no other scaling"):
        config(tmp_path, keys, {"rope_freqs.weight": np.ones(8, np.float32)})


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 8.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 8.0,
            },
        ),
        (
            {"type": "yarn", "factor": 40.0, "yarn_log_multiplier": 0.0707},
            {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
    ],
)
def test_scalings_of_rope(keys: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    found = config(tmp_path, {f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    assert found["rope_parameters"] == {"rope_theta": 500000.0, **wanted}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"llama.logit_scale": 0.5}, r"key 'llama.logit_scale' = 0.5 is not implemented"),
        ({"llama.expert_gating_func": 2}, r"expert_gating_func' = 2 is not implemented"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
          "llama.rope.scaling.attn_factor": 0.5}, "attn_factor' = 0.5 is not implemented"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        config(tmp_path, keys)


def test_a_list_that_says_one_thing_is_that(tmp_path: Path) -> None:
    assert config(tmp_path, {"llama.attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2


def test_a_file_without_an_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    with pytest.raises(CheckpointError, match=r"'general.architecture': wanted a string"):
        adopted(Checkpoint.open(path))


def test_each_architecture_is_claimed_apart() -> None:
    """Two families of one architecture have something that tells their files apart."""
    claimed: dict[str, set[str]] = {}
    for family in all_families():
        for names in family.gguf:
            claimed.setdefault(names.architecture, set()).add(family.model_type)
    assert {name: len(families) for name, families in claimed.items() if len(families) > 1} == {
        "llama": 2,
        "deepseek2": 2,
    }
