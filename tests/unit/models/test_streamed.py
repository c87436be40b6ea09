"""Keys of hybrids between gated streams: both spellings of a kind, and refusals by name."""

from typing import Any

import pytest

from colibri.errors import ConfigError, UnsupportedModelError
from colibri.models.blueprint import Blueprint
from colibri.models.qwen4_exp import FAMILY
from colibri.models.streamed import StreamedConfig
from colibri.nn.block_sparse import BlockSparseAttention
from colibri.nn.delta import GatedDeltaNet


def config(**changes: Any) -> StreamedConfig:
    found = Blueprint.of(FAMILY.tiny_config(**changes)).config
    assert isinstance(found, StreamedConfig)
    return found


def test_layers_with_an_indexer_are_called_by_either_name() -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    published = config(layer_types=kinds)
    assert [published.attention(i) for i in range(3)] == [config().attention(i) for i in range(3)]
    assert isinstance(published.attention(1), BlockSparseAttention)
    assert isinstance(published.attention(2), GatedDeltaNet)


def test_tables_of_later_layers_have_other_primes() -> None:
    first, second = config().embedding(0), config().embedding(2)
    assert config().embedding(1) is None
    assert first is not None
    assert second is not None
    assert [first.hash.layer, second.hash.layer] == [0, 1]
    assert first.hash.end == 2
    listed = config(eos_token_id=[7, 2]).embedding(0)
    assert listed is not None
    assert listed.hash.end == 7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hc_count", 0),
        ("indexer_kv_heads", 2),
        ("indexer_compress_ratio", 3),
        ("indexer_budget", 13),
        ("indexer_head_dim", 6),
        ("attn_output_gate", False),
        ("ngram_size", 1),
        ("ple_layer_ids", [4]),
        ("ple_embed_dim", 50),
        ("eos_token_id", None),
        ("ngram_vocab_size_base", 1 << 40),
    ],
)
def test_what_does_not_fit_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        config(**{key: value})


def test_another_gate_is_refused_by_name() -> None:
    assert config(output_gate_type="sigmoid").gate == "sigmoid"
    with pytest.raises(UnsupportedModelError, match=r"output_gate_type = 'relu'"):
        config(output_gate_type="relu")
