"""config.json: what is declared is checked, what is not and could matter is refused by name."""

from dataclasses import MISSING, dataclass, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.checkpoint.config import normalize
from colibri.errors import ConfigError, UnsupportedModelError
from colibri.models.config import BaseConfig, StridedMoEConfig
from colibri.models.family import Family
from colibri.models.registry import all_families
from tests.tiny import each_family, each_sparse

FAMILIES = all_families()
BASE: dict[str, Any] = {
    "model_type": "any",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
STRIDED = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "intermediate_size": 112,
    "moe_intermediate_size": 32,
}


def read(family: Family, **changes: Any) -> BaseConfig:
    """The family's tiny config with changes."""
    return family.config.read(normalize(family.tiny_config(**changes)))


def required(config: type[BaseConfig]) -> list[str]:
    """Keys without a default."""
    return [
        item.name
        for item in fields(config)
        if item.default is MISSING and item.default_factory is MISSING
    ]


@each_family
def test_tiny_reads(family: Family) -> None:
    config = read(family)
    assert config.model_type in (family.model_type, *family.aliases)
    assert config.num_hidden_layers == 3


@each_family
def test_every_required_key_is_missed_by_name(family: Family) -> None:
    whole = normalize(family.tiny_config())
    keys = required(family.config)
    assert {"hidden_size", *BASE} <= set(keys)
    for key in keys:
        for found in ({k: v for k, v in whole.items() if k != key}, {**whole, key: None}):
            with pytest.raises(ConfigError, match=f"the key {key} is missing") as refusal:
                family.config.read(found)
            assert family.config.__module__.rsplit(".", 1)[-1] in str(refusal.value)


@each_family
def test_every_wrong_type_is_refused_by_name(family: Family) -> None:
    whole = normalize(family.tiny_config())
    for item in fields(family.config):
        with pytest.raises(ConfigError, match=item.name):
            family.config.read({**whole, item.name: object()})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("num_hidden_layers", [3]),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", True),
        ("rms_norm_eps", 10**400),
        ("tie_word_embeddings", 1),
        ("hidden_act", 3),
        ("rope_parameters", [1]),
        ("head_dim", 16.5),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, "3"]),
    ],
    ids=str,
)
def test_wrong_types(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key) as refusal:
        BaseConfig.read({**BASE, key: value})
    assert "wrong type" in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 0) for key in BASE if isinstance(BASE[key], int)),
        *((key, -4) for key in BASE if isinstance(BASE[key], int)),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", -2),
        ("head_dim", 0),
        ("head_dim", 15),
        ("hidden_size", 66),
        ("rms_norm_eps", -1e-5),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} = {value}"):
        BaseConfig.read({**BASE, key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 0),
        ("num_experts_per_tok", 0),
        ("num_experts_per_tok", 17),
        ("moe_intermediate_size", 0),
        ("intermediate_size", -1),
        ("decoder_sparse_step", 0),
        ("decoder_sparse_step", -1),
        ("mlp_only_layers", ["0"]),
    ],
    ids=str,
)
def test_sizes_of_experts_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        StridedMoEConfig.read({**BASE, **STRIDED, key: value})


def test_defaults() -> None:
    config = BaseConfig.read(BASE)
    assert (config.kv_heads, config.head_width) == (4, 16)
    assert not config.tie_word_embeddings
    assert config.rope.rotary_dim == 16
    assert config.rope.inverse_frequencies[1] == pytest.approx(10000 ** (-2 / 16))


def test_what_is_given_counts() -> None:
    given_keys = {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "eos_token_id": [1, 2],
        "bos_token_id": 0,
    }
    config = BaseConfig.read({**BASE, **given_keys, "rms_norm_eps": 1})
    assert (config.kv_heads, config.head_width) == (2, 32)
    assert (config.eos_token_id, config.bos_token_id) == ((1, 2), 0)
    assert isinstance(config.rms_norm_eps, float)


def test_a_familys_own_theta() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(BaseConfig):
        default_rope_theta = 1e6

    assert Other.read(BASE).rope.inverse_frequencies[1] == pytest.approx(1e6 ** (-2 / 16))
    given_theta = {"rope_type": "default", "rope_theta": 100.0}
    found = Other.read({**BASE, "rope_parameters": given_theta})
    assert found.rope.inverse_frequencies[1] == pytest.approx(100 ** (-2 / 16))


@pytest.mark.parametrize("act", ["gelu", "swish", "relu2"])
def test_other_activations_are_refused(act: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"hidden_act = '{act}'"):
        BaseConfig.read({**BASE, "hidden_act": act})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_group", 8),
        ("routed_scaling_factor", 2.5),
        ("scoring_func", "sigmoid"),
        ("n_shared_experts", 1),
        ("attention_multiplier", 0.5),
        ("logits_scaling", 8.0),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("use_sliding_window", True),
        ("attention_chunk_size", 8192),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("layer_types", "full_attention"),
        ("output_gate_type", "swish"),
        ("output_multiplier", 0.5),
        ("attn_output_gate", True),
        ("mlp_bias", True),
        ("kv_lora_rank", 512),
        ("a_key_of_tomorrow", "x"),
    ],
    ids=str,
)
def test_keys_that_change_the_result_are_refused(key: str, value: Any) -> None:
    """Whatever the family, unless it declares the key."""
    for config in (BaseConfig, *(family.config for family in FAMILIES)):
        if key in {item.name for item in fields(config)}:
            continue
        whole = BASE if config is BaseConfig else None
        family = next((f for f in FAMILIES if f.config is config), None)
        found = whole if family is None else normalize(family.tiny_config())
        with pytest.raises(UnsupportedModelError) as refusal:
            config.read({**(found or {}), key: value})
        assert f"{key} = {value!r}" in str(refusal.value)


@settings(max_examples=30)
@given(
    st.from_regex(r"[a-z]{3,8}_x[a-z_]{3,12}", fullmatch=True),
    st.one_of(st.integers(1), st.floats(0.5, 2), st.text(min_size=1), st.just(True)),
)
def test_unknown_keys_pass_only_where_they_are_off(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        BaseConfig.read({**BASE, key: value})
    for off in (None, False, 0, 0.0, "", [], {}):
        assert BaseConfig.read({**BASE, key: off}) == BaseConfig.read(BASE)


INERT = {
    "_name_or_path": "here",
    "architectures": ["X"],
    "attention_dropout": 0.1,
    "attn_implementation": "eager",
    "auto_map": {"AutoConfig": "a.b"},
    "dtype": "bfloat16",
    "initializer_range": 0.02,
    "layer_types": ["full_attention"] * 3,
    "max_window_layers": 28,
    "num_nextn_predict_layers": 1,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_router_logits": True,
    "pad_token_id": 1,
    "router_aux_loss_coef": 0.001,
    "router_z_loss_coef": 0.1,
    "transformers_version": "5.0.0",
    "use_cache": True,
}


@pytest.mark.parametrize("key", INERT)
@each_family
def test_inert_keys_pass(family: Family, key: str) -> None:
    if key in family.tiny:
        return  # there it says something
    if key in {item.name for item in fields(family.config)}:
        assert read(family, **{key: INERT[key]}).model_type == read(family).model_type
    else:
        assert read(family, **{key: INERT[key]}) == read(family)


@pytest.mark.parametrize("alias", ["num_experts", "num_local_experts", "n_routed_experts"])
@each_sparse
def test_spellings_of_the_number_of_experts(family: Family, alias: str) -> None:
    config = normalize(family.tiny_config())
    count = config.pop("num_experts")
    found = family.config.read(normalize({**config, alias: count}))
    assert getattr(found, "num_experts") == count  # noqa: B009  (families declare it)


@each_family
def test_theta_in_either_spelling(family: Family) -> None:
    old = family.tiny_config(rope_theta=5e5, rope_scaling={"rope_type": "default"})
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    found = [family.config.read(normalize(config)).rope.key for config in (old, new)]
    assert found[0] == found[1]


@given(st.integers(1, 6), st.sets(st.integers(0, 11)))
def test_stride_and_exceptions(step: int, dense: set[int]) -> None:
    config = StridedMoEConfig.read(
        {
            **BASE,
            **STRIDED,
            "num_hidden_layers": 12,
            "decoder_sparse_step": step,
            "mlp_only_layers": sorted(dense),
        }
    )
    found = [i for i in range(12) if config.is_sparse(i)]
    assert found == [i for i in range(step - 1, 12, step) if i not in dense]
