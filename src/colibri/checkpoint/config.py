"""config.json: read strictly, and its spellings brought to one.

Families read the keys of the current Hugging Face spelling only; older and nested ones end here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from colibri.checkpoint.strict_json import read_object, shown
from colibri.errors import ConfigError

_SIZE_LIMIT = 16 * 2**20
_ALIASES = {
    "num_experts": ("n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_shared_experts": ("num_shared_experts",),
    "n_group": ("num_expert_group",),
    "norm_topk_prob": ("moe_renormalize",),
    "scoring_func": ("moe_router_activation_func",),
    "dtype": ("torch_dtype",),
}
_OF_THE_WHOLE = ("tie_word_embeddings",)  # what the whole model says counts
_ROPE_TYPES = {"su": "longrope", "mrope": "default"}  # older names
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")


def read_config(path: Path) -> dict[str, Any]:
    """The object in `path` as it is spelled there.

    Raises:
        ConfigError: unreadable, over 16 MiB, not JSON, a key twice, or NaN.
    """
    return read_object(path, _SIZE_LIMIT, ConfigError, infinity=True)


def with_model_type(raw: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The same config of another `model_type`, that of its text part where it has one."""
    text = raw.get("text_config")
    nested = (
        {"text_config": {**text, "model_type": model_type}} if isinstance(text, Mapping) else {}
    )
    return {**raw, "model_type": model_type, **nested}


def normalize(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config in the current spelling.

    * `text_config` is lifted to the top and wins over what stood there, but for
      `tie_word_embeddings`.
    * `n_routed_experts`, `num_local_experts`, `moe_num_experts` become `num_experts`, on either
      level (null: no experts, no key); `torch_dtype` becomes `dtype`, and other second names of
      one thing (`_ALIASES`) their first.
    * `rope_theta`, `rope_scaling` and `partial_rotary_factor` become `rope_parameters` `{rope_type,
      …}`; `type` becomes `rope_type`, which is left out where neither `rope_scaling` nor
      `rope_parameters` is given. Parameters by kind of layer (a dict of dicts) stay nested. A model
      without any of them gets no such key.

    Raises:
        ConfigError: two spellings of one thing differ, or one has a wrong type; names both keys.
    """
    text = raw.get("text_config") or {}
    _want(isinstance(text, Mapping), "text_config", "an object", text)
    whole, part = _canonical(raw, ""), _canonical(text, "text_config.")
    if {"num_experts"} <= whole.keys() & part.keys():
        _same("num_experts", whole["num_experts"], "text_config.num_experts", part["num_experts"])
    flat = {**whole, **part, **{key: whole[key] for key in _OF_THE_WHOLE if key in whole}}
    flat.pop("text_config", None)
    return flat


def _canonical(level: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One level with every alias replaced."""
    config = dict(level)
    for name, aliases in _ALIASES.items():
        _fold(config, name, aliases, where)
    if "num_experts" in config:
        count = config["num_experts"]
        _want(type(count) is int and count >= 0, f"{where}num_experts", "a count", count)
    rope = _rope(config, where)
    if rope is not None:
        config["rope_parameters"] = rope
    return config


def _fold(config: dict[str, Any], name: str, aliases: Iterable[str], where: str) -> None:
    """Move the value of any alias to `name`; null says nothing."""
    spelled, value = name, config.pop(name, None)
    for alias in aliases:
        other = config.pop(alias, None)
        if other is None:
            continue
        if value is not None:
            _same(where + spelled, value, where + alias, other)
        spelled, value = alias, other
    if value is not None:
        config[name] = value


def _rope(config: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Take all rope keys out of `config`; the one `rope_parameters`, None where there was none."""
    given = {key: config.pop(key, None) for key in ("rope_parameters", "rope_scaling")}
    for key, value in given.items():
        _want(value is None or isinstance(value, Mapping), where + key, "an object", value)
    parameters, scaling = given["rope_parameters"], given["rope_scaling"]
    if parameters and all(isinstance(value, Mapping) for value in parameters.values()):
        _want(not scaling, f"{where}rope_scaling", "null beside nested rope_parameters", scaling)
        return {kind: _typed(values, where) for kind, values in parameters.items()}
    flat = {key: config.pop(key) for key in _ROPE_KEYS if config.get(key) is not None}
    if parameters is None and scaling is None and not flat:
        return None
    rope: dict[str, Any] = {}
    for source in (_typed(parameters or {}, where), _typed(scaling or {}, where), flat):
        for key, value in source.items():
            _same(f"{where}{key}", rope.setdefault(key, value), f"the other {key}", value)
    plain = parameters is None and scaling is None
    return rope if plain else {"rope_type": "default", **rope}


def _typed(rope: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope` with its kind as `rope_type`, under its current name."""
    config = {key: _current(value) for key, value in rope.items() if key in ("type", "rope_type")}
    _fold(config, "rope_type", ("type",), f"{where}rope_parameters.")
    return {**{key: value for key, value in rope.items() if key != "type"}, **config}


def _current(kind: Any) -> Any:
    return _ROPE_TYPES.get(kind, kind) if isinstance(kind, str) else kind


def _same(key: str, value: Any, other_key: str, other: Any) -> None:
    if value != other:
        raise ConfigError(
            f"config.json: {key} is {shown(value)} but {other_key} is {shown(other)};"
            " they mean the same, remove the wrong one"
        )


def _want(holds: bool, key: str, wanted: str, found: Any) -> None:
    if not holds:
        raise ConfigError(f"config.json: {key}: wanted {wanted}, found {shown(found)}")
