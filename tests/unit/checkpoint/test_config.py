"""Every spelling of a config ends as the same keys; contradictions are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from colibri.checkpoint.config import normalize, read_config
from colibri.errors import ConfigError

SHARED = Path(__file__).parents[4] / "shared" / "fixtures"
PAIRS = sorted(SHARED.glob("*/*/config.hub_style.json"))
ABSENT = pytest.param(SHARED, marks=pytest.mark.skip(reason=f"no fixtures in {SHARED}"))
EXPERT_KEYS = ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"]
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("key", EXPERT_KEYS)
@pytest.mark.parametrize("nested", [False, True])
def test_expert_counts(key: str, nested: bool) -> None:
    config = {"hidden_size": 8, key: 16}
    assert normalize({"text_config": config} if nested else config) == {
        "hidden_size": 8,
        "num_experts": 16,
    }


@pytest.mark.parametrize("config", [{}, {"n_routed_experts": None}, {"text_config": None}])
def test_dense(config: dict[str, Any]) -> None:
    assert normalize(config) == {}


def test_text_config_is_lifted() -> None:
    config = {
        "model_type": "outer",
        "tie_word_embeddings": True,
        "vision_config": {"num_experts": 2},
        "text_config": {"model_type": "inner", "tie_word_embeddings": False, "num_experts": 4},
    }
    assert normalize(config) == {
        "model_type": "inner",
        "tie_word_embeddings": True,
        "vision_config": {"num_experts": 2},
        "num_experts": 4,
    }


def test_the_argument_is_left_alone() -> None:
    config = {"torch_dtype": "float32", "rope_theta": 1e4, "text_config": {"moe_num_experts": 2}}
    before = json.dumps(config)
    normalize(config)
    assert json.dumps(config) == before


def test_dtype() -> None:
    assert normalize({"torch_dtype": "bfloat16"}) == {"dtype": "bfloat16"}
    assert normalize({"torch_dtype": "float16", "dtype": "float16"}) == {"dtype": "float16"}


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}),
        ({"rope_scaling": {"rope_theta": 5e5}}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}},
            {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
            },
            {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_theta": 1e4},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        ({"rope_scaling": {"type": "su"}}, {"rope_type": "longrope"}),
        (
            {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1]}},
            {"rope_type": "default", "mrope_section": [1]},
        ),
        (
            {"rope_parameters": {"full": {"type": "yarn"}, "sliding": {"rope_type": "default"}}},
            {"full": {"rope_type": "yarn"}, "sliding": {"rope_type": "default"}},
        ),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_rope(config: dict[str, Any], rope: dict[str, Any], nested: bool) -> None:
    found = normalize({"text_config": config} if nested else config)
    assert found == {"rope_parameters": rope}


def test_no_rope_makes_no_key() -> None:
    assert normalize({"rope_theta": None, "rope_scaling": None}) == {"rope_theta": None}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (
            {"num_experts": 4, "num_local_experts": 8},
            ["num_experts", "num_local_experts", "4", "8"],
        ),
        ({"n_routed_experts": 4, "moe_num_experts": 8}, ["n_routed_experts", "moe_num_experts"]),
        ({"num_experts": 4, "text_config": {"n_routed_experts": 8}}, ["text_config.num_experts"]),
        ({"num_experts": "8"}, ["num_experts", "'8'"]),
        ({"num_experts": True}, ["num_experts", "True"]),
        ({"moe_num_experts": [8, 8]}, ["num_experts", "[8, 8]"]),
        ({"num_experts": -1}, ["num_experts", "-1"]),
        ({"dtype": "float16", "torch_dtype": "float32"}, ["dtype", "torch_dtype"]),
        ({"text_config": [1]}, ["text_config"]),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, ["rope_theta", "1000000.0"]),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, ["rope_type", "type"]),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": {"rope_type": "linear"}}, ["yarn"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'"]),
        ({"rope_parameters": [1]}, ["rope_parameters"]),
        ({"rope_scaling": {"a": 1}, "rope_parameters": {"full": {"b": 1}}}, ["rope_scaling"]),
    ],
)
def test_contradictions(config: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        normalize(config)
    assert [name for name in names if name not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "wanted a JSON object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' stands there twice"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"{}" + b" " * 2**24, "at most 16777216 bytes"),
    ],
)
def test_broken_files(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_infinity_is_a_number_here(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_config(path) == {"time_step_limit": [0.0, float("inf")]}


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize("old", PAIRS or [ABSENT], ids=lambda path: path.parent.name)
def test_real_configs_in_both_spellings(old: Path) -> None:
    """What both spellings of one model say is the same."""
    new, found = normalize(read_config(old.with_name("config.json"))), normalize(read_config(old))
    keys = {"num_experts", "dtype", "rope_parameters"} & new.keys() & found.keys()
    if any(isinstance(value, dict) for value in new.get("rope_parameters", {}).values()):
        keys.remove("rope_parameters")  # by kind of layer: only the family can join older keys
    for config in (new, found):  # the older spelling names no plain rope
        if "rope_parameters" in keys:
            config["rope_parameters"].setdefault("rope_type", "default")
    if "rotary_dim" in found:  # the older way to say partial_rotary_factor
        new["rope_parameters"].pop("partial_rotary_factor", None)
    assert {key: found[key] for key in keys} == {key: new[key] for key in keys}
