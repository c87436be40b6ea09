"""Inkling's keys: which layers slide, which are dense, how wide an expert is, in both spellings."""

from typing import Any

import numpy as np
import pytest

from colibri.errors import ConfigError
from colibri.models.blueprint import Blueprint
from colibri.models.inkling import InklingConfig
from colibri.models.inkling_text import FAMILY
from colibri.nn.relative import LogScaling


def config(**changes: Any) -> InklingConfig:
    """The tiny model's, changed; null says nothing."""
    found = Blueprint.of(FAMILY.tiny_config(**changes)).config
    assert isinstance(found, InklingConfig)
    return found


def test_layers_slide_by_list_by_index_or_all_but_every_sixth() -> None:
    assert [config().slides(i) for i in range(3)] == [True, False, True]
    by_index = config(layer_types=None, local_layer_ids=[1])
    assert [by_index.slides(i) for i in range(3)] == [False, True, False]
    by_rule = config(layer_types=None, mlp_layer_types=None, num_hidden_layers=13)
    assert [i for i in range(13) if not by_rule.slides(i)] == [5, 11]


def test_layers_are_dense_by_list_or_by_number() -> None:
    assert [config().is_sparse(i) for i in range(3)] == [False, True, True]
    by_number = config(mlp_layer_types=None, dense_mlp_idx=2)
    assert [by_number.is_sparse(i) for i in range(3)] == [False, False, True]


def test_published_configs_name_the_dense_width_of_its_own() -> None:
    published = config(
        moe_intermediate_size=None, intermediate_size=32, dense_intermediate_size=112
    )
    assert published.feed_forward(0) == config().feed_forward(0)
    assert published.feed_forward(1) == config().feed_forward(1)


def test_only_layers_that_see_everything_scale_with_the_position() -> None:
    assert [config().attention(i).scaling for i in range(3)] == [None, LogScaling(0.1, 8), None]
    assert config(log_scaling_n_floor=None).attention(1).scaling is None
    positions = np.array([0, 6, 7, 15, 63], np.int32)
    found = LogScaling(0.1, 8).temperature(positions)
    wanted = 1 + 0.1 * np.log([1, 1, 1, 2, 8])
    np.testing.assert_allclose(found, wanted, rtol=1e-7)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shared_expert_sink", False),
        ("d_rel", 65),
        ("n_shared_experts", 0),
        ("rel_extent", 0),
        ("sliding_window_size", -1),
        ("conv_kernel_size", 17),
        ("swa_num_key_value_heads", 4),
        ("unpadded_vocab_size", 600),
        ("moe_intermediate_size", None),
        ("layer_types", ["hybrid"]),
        ("mlp_layer_types", ["dense", "sparse", "thick"]),
        ("logits_mup_width_multiplier", 0.0),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(key: str, value: Any) -> None:
    name = "rope_parameters" if key == "rope_scaling" else key
    with pytest.raises(ConfigError, match=name):
        config(**{key: value})


def test_embedding_and_output_matrix_are_never_tied() -> None:
    """Transformers reads both, whatever tie_word_embeddings says."""
    tied = Blueprint.of(FAMILY.tiny_config(tie_word_embeddings=True))
    assert "lm_head.weight" in {each.name for each in tied.parameters()}
