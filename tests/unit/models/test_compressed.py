"""DeepSeek-V4 and GLM-5.3-Flash: what their configs say in either spelling; what is refused."""

from typing import Any

import numpy as np
import pytest

from colibri.checkpoint.rename import Renaming
from colibri.errors import CheckpointError, ConfigError, UnsupportedModelError
from colibri.kernels.api import Swiglu
from colibri.models import deepseek_v4, glm5_next
from colibri.models.blueprint import Blueprint
from colibri.models.compressed import AS_PUBLISHED, PUBLISHED
from colibri.nn.delta import KimiDeltaAttention
from colibri.nn.ffn import DenseFFN
from colibri.nn.hyper import HyperConnected
from colibri.nn.mla import MultiHeadLatentAttention
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route
from colibri.nn.shared_key import CompressedAttention, Compression
from colibri.nn.sublayer import Layer, Sublayer
from tests.unit.nn.weights import NumberedWeights

V4, GLM = deepseek_v4.FAMILY, glm5_next.FAMILY
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def inner(layer: Layer, number: int) -> Sublayer:
    """Attention (0) or feed-forward (1), out of its streams."""
    wrapped = layer.sublayers[number]
    assert isinstance(wrapped, HyperConnected)
    return wrapped.inner


def attention(index: int, **changes: Any) -> CompressedAttention:
    found = inner(Blueprint.of(V4.tiny_config(**changes)).layers[index], 0)
    assert isinstance(found, CompressedAttention)
    return found


def route(index: int, **changes: Any) -> Route:
    found = inner(Blueprint.of(V4.tiny_config(**changes)).layers[index], 1)
    assert isinstance(found, MoEFFN)
    return found.route


def compressions(**changes: Any) -> list[Compression | None]:
    count = changes.get("num_hidden_layers", 3)
    return [attention(index, **changes).compression for index in range(count)]


def test_both_spellings_say_what_layers_see() -> None:
    window, sparse, heavy = compressions()
    assert window is None
    assert sparse is not None
    assert heavy is not None
    assert (sparse.stride, sparse.overlap, heavy.stride, heavy.overlap) == (4, True, 8, False)
    assert sparse.index is not None
    assert sparse.index.top_k == 4
    assert heavy.index is None
    ratios = {"layer_types": None, "compress_rates": None}
    assert compressions(**ratios, compress_ratios=[0, 4, 8]) == [window, sparse, heavy]
    assert compressions(**ratios, compress_ratios=[1, 4, 8, 0, 0]) == [window, sparse, heavy]
    usual = compressions(**ratios, num_hidden_layers=5)
    assert [each and each.stride for each in usual] == [128, 128, 128, 4, 128]


def test_ropes() -> None:
    main, compress = attention(0).rope, attention(1).rope
    assert main.rotary_dim == compress.rotary_dim == 8
    assert main.inverse_frequencies[1] == pytest.approx(10000 ** (-2 / 8))
    assert compress.attention_factor == 1
    nested = {
        "rope_scaling": None,
        "rope_theta": None,
        "qk_rope_head_dim": None,
        "rope_parameters": {
            "main": {"rope_theta": 500.0, "partial_rotary_factor": 0.25},
            "compress": {"rope_theta": 700.0, "partial_rotary_factor": 0.25},
        },
    }
    main, compress = attention(0, **nested).rope, attention(1, **nested).rope
    assert main.inverse_frequencies[1] == pytest.approx(500 ** (-2 / 8))
    assert compress.inverse_frequencies[1] == pytest.approx(700 ** (-2 / 8))


def test_the_first_layers_take_experts_from_a_table() -> None:
    assert [route(index).vocab_size for index in range(3)] == [512, None, None]
    assert [route(index).choice_bias for index in range(3)] == [False, True, True]
    kinds = ["moe", "hash_moe", "moe"]
    said = {"num_hash_layers": None, "mlp_layer_types": kinds}
    assert [route(i, **said).vocab_size for i in range(3)] == [None, 512, None]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"layer_types": None, "compress_ratios": [0, 4]}, "compress_ratios"),
        (
            {"layer_types": None, "compress_rates": None, "compress_ratios": [0, 4, 6]},
            "compress_ratios",
        ),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"compress_rates": {"compressed_sparse_attention": 5}}, "compress_rates"),
        ({"compress_rates": {"compressed_sparse_attention": "4"}}, "compress_rates"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"o_groups": 3}, "o_groups"),
        ({"o_lora_rank": 12}, "o_lora_rank"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"index_topk": 0}, "index_topk"),
        ({"hc_mult": 0}, "hc_mult"),
        ({"hc_mult": 10**9}, "hc_mult"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters"),
        ({"swiglu_limit": -1}, "swiglu_limit"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"mlp_layer_types": ["moe", "dense", "moe"]}, "mlp_layer_types"),
    ],
    ids=str,
)
def test_v4_refuses(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = "):
        Blueprint.of(V4.tiny_config(**changes))


def test_unknown_keys_of_v4_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="attn_bias = True"):
        Blueprint.of(V4.tiny_config(attn_bias=True))


def test_published_names_and_ours_are_one_to_one() -> None:
    renaming = Renaming(PUBLISHED)
    for parameter in Blueprint.of(V4.tiny_config()).parameters():
        theirs = parameter.name
        for ours, published in AS_PUBLISHED:
            theirs = theirs.replace(ours, published)
        assert renaming.name(theirs) == parameter.name
        assert not theirs.startswith("model.")


@pytest.mark.parametrize(
    "row", [[3.0, 3.0], [0.0, 8.0], [-1.0, 2.0], [np.nan, 2.0]], ids=["twice", "high", "low", "nan"]
)
def test_a_broken_table_is_refused(row: list[float]) -> None:
    hashed = Route(normalize=True, scoring="sqrtsoftplus", vocab_size=4)
    weights = NumberedWeights(hashed.parameters("gate.", 8, 6, 2))
    table = np.array([[0, 1], [2, 3], row, [4, 7]], np.float32)
    weights.vector = lambda name: table.reshape(-1)  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"gate\.tid2eid: token 2 has experts"):
        hashed.bind_table(weights, "gate.", 8)
    table[2] = [5, 6]
    found = hashed.bind_table(weights, "gate.", 8)
    np.testing.assert_array_equal(found, table)


def test_glm_layers() -> None:
    layers = Blueprint.of(GLM.tiny_config()).layers
    delta, full, shared = (inner(layer, 0) for layer in layers)
    assert isinstance(delta, KimiDeltaAttention)
    assert delta.lower_bound == -5
    assert isinstance(full, MultiHeadLatentAttention)
    assert isinstance(shared, MultiHeadLatentAttention)
    assert (full.rope, full.rope_dim, full.latent_norm.eps) == (None, 0, 1e-5)
    assert full.index is not None
    assert shared.index is not None
    assert (full.index.top_k, full.index.pool, full.index.shared) == (4, 2, False)
    assert shared.index.shared
    assert full.state.planes[-1].stride == 2
    assert full.state.cell_nbytes > 0
    assert shared.state.cell_nbytes == 0
    dense, sparse, _ = (inner(layer, 1) for layer in layers)
    assert isinstance(dense, DenseFFN)
    assert isinstance(sparse, MoEFFN)
    assert dense.swiglu == sparse.swiglu == Swiglu(limit=1.5)


def test_three_of_four_glm_layers_are_linear_unless_it_is_said() -> None:
    usual = {"layer_types": None, "mlp_layer_types": None, "indexer_types": None}
    found = Blueprint.of(GLM.tiny_config(num_hidden_layers=5, **usual)).layers
    kinds = [isinstance(inner(layer, 0), KimiDeltaAttention) for layer in found]
    assert kinds == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim"),
        ({"index_kpool": 3}, "index_kpool"),
        ({"index_kpool": 1}, "index_kpool"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"linear_lower_bound": 1.0}, "linear_lower_bound"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ],
    ids=str,
)
def test_glm_refuses(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = "):
        Blueprint.of(GLM.tiny_config(**changes))


def test_glm_reads_the_nested_spelling_of_delta_attention() -> None:
    config = GLM.tiny_config()
    for key in ("linear_num_heads", "linear_head_dim"):
        config.pop(key)
    nested = {"head_dim": 16, "num_heads": 4, "gate_lower_bound": -3.0}
    found = inner(Blueprint.of({**config, "linear_attn_config": nested}).layers[0], 0)
    assert isinstance(found, KimiDeltaAttention)
    assert (found.num_heads, found.key_dim, found.lower_bound) == (4, 16, -3.0)
