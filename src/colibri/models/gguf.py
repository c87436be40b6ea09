"""A GGUF checkpoint made one as Hugging Face would have published it: its config and its names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from colibri.checkpoint.config import read_config, with_model_type
from colibri.checkpoint.gguf import Gguf as Source
from colibri.checkpoint.gguf import gguf_of
from colibri.checkpoint.gguf_header import Strings
from colibri.checkpoint.index import Checkpoint, check_directory
from colibri.checkpoint.safetensors import TensorSpec, read_tensor
from colibri.checkpoint.strict_json import shown
from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.models.family import Family
from colibri.models.gguf_names import ROPE_FREQUENCIES, SILENT_KEYS, Gguf, Keys
from colibri.models.registry import all_families, get_family

_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GATING = {1: "softmax", 2: "sigmoid"}
_GATING_KEY = "expert_gating_func"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def adopted(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with a config and with our names; one that is no GGUF as it is.

    Raises:
        UnsupportedModelError: an architecture that no family has, or a key that is not read.
        CheckpointError: metadata that is missing or contradicts itself.
    """
    source = checkpoint.gguf
    if source is None:
        return checkpoint
    keys = Keys.of(source.architecture, source.metadata)
    family, names = _family(source, keys, checkpoint.config.get("model_type"))
    tensors = {name: spec for name, spec in source.tensors.items() if name != ROPE_FREQUENCIES}
    renamed = names.renaming.apply(tensors)
    renamed = {name: _shaped(name, spec) for name, spec in renamed.items()}
    config = _config(source, keys, family, names, renamed)
    return replace(checkpoint, config=config, tensors=renamed)


def model_config(path: Path, model_type: str | None = None) -> dict[str, Any]:
    """What config.json says, or would say of a GGUF file; `model_type` counts instead of its own.

    Raises:
        ConfigError, CheckpointError, UnsupportedModelError: it cannot be read or understood.
    """
    if gguf_of(path) is not None:
        return adopted(Checkpoint.open(path, model_type)).config
    check_directory(path)
    config = read_config(path / "config.json")
    return config if model_type is None else with_model_type(config, model_type)


def _family(source: Source, keys: Keys, wanted: str | None) -> tuple[Family, Gguf]:
    families = all_families() if wanted is None else (get_family(wanted),)
    for family in families:
        for names in family.gguf:
            if wanted is not None or (names.architecture == keys.architecture and names.when(keys)):
                return family, names
    known = sorted({names.architecture for each in all_families() for names in each.gguf})
    raise UnsupportedModelError(
        f"{source.path}: GGUF files of architecture {shown(keys.architecture)} are not read; read"
        f" are {', '.join(known)}: take the safetensors files of this model"
    )


def _shaped(name: str, spec: TensorSpec) -> TensorSpec:
    """Files drop the one row of a shared expert's gate."""
    single = name.endswith(".shared_expert_gate.weight") and len(spec.shape) == 1
    return replace(spec, shape=(1, *spec.shape)) if single else spec


def _config(
    source: Source, keys: Keys, family: Family, names: Gguf, tensors: Mapping[str, TensorSpec]
) -> dict[str, Any]:
    """config.json of the model."""
    known, config = names.config_keys, dict[str, Any]()
    for key, value in keys.values.items():
        if key in known:
            config[known[key]] = _number(source, keys, key, value)
        elif key not in SILENT_KEYS and value not in (0, False, "") and key not in names.keys:
            raise UnsupportedModelError(
                f"{source.path}: key {shown(f'{keys.architecture}.{key}')} = {shown(value)} is not"
                " implemented and may change the result; the model is refused rather than computed"
                " wrongly"
            )
    drafting = config.get("num_nextn_predict_layers") or 0
    if "num_hidden_layers" in config:
        config["num_hidden_layers"] -= drafting
    embedding = tensors.get("model.embed_tokens.weight")
    config |= {
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0] if embedding else 0,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "rope_interleave": names.pairs or None,
        "scoring_func": _scoring(source, keys, family, names),
        **_tokens(source.metadata),
        **_derived(family, tensors, config.get("num_hidden_layers", 0)),
        **names.config,
    }
    config["rope_parameters"] = _rope(source, keys, config, names)
    if names.adapt is not None:
        config |= names.adapt(keys, config)
    return {key: value for key, value in config.items() if value is not None}


def _scoring(source: Source, keys: Keys, family: Family, names: Gguf) -> str | None:
    """How router logits become scores, where the family asks."""
    number = keys.get(_GATING_KEY)
    if any(item.name == "scoring_func" for item in fields(family.config)):
        return None if number is None else _GATING.get(number, str(number))
    if number not in (None, 0, 1) and _GATING_KEY not in names.keys:
        raise UnsupportedModelError(
            f"{source.path}: key '{keys.architecture}.{_GATING_KEY}' = {number} is not implemented"
            f" for {family.model_type}"
        )
    return None


def _number(source: Source, keys: Keys, key: str, value: Any) -> Any:
    """A value that holds for the model; a list that says the same for every layer is one."""
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        value = value[0]
    if isinstance(value, list | Strings | str):
        raise UnsupportedModelError(
            f"{source.path}: key {shown(f'{keys.architecture}.{key}')} = {shown(value)}: wanted one"
            " number for all layers"
        )
    return value


def _tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Ids that begin and end a text."""
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_IDS]
    ends = list(dict.fromkeys(each for each in ids if each is not None))
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends or None,
    }


def _derived(family: Family, tensors: Mapping[str, TensorSpec], layers: int) -> dict[str, Any]:
    """Keys of the family that the tensors answer."""
    first, own = "model.layers.0.", {item.name for item in fields(family.config)}
    sparse = {
        int(found[1])
        for name in tensors
        if ".mlp.experts." in name and (found := _LAYER.match(name))
    }
    answers: dict[str, Any] = {
        "attention_bias": f"{first}self_attn.q_proj.bias" in tensors,
        "mlp_bias": f"{first}mlp.down_proj.bias" in tensors,
        "use_qk_norm": f"{first}self_attn.q_norm.weight" in tensors,
        "mlp_only_layers": [index for index in range(min(layers, 4096)) if index not in sparse],
    }
    return {key: value for key, value in answers.items() if key in own}


def _rope(source: Source, keys: Keys, config: dict[str, Any], names: Gguf) -> dict[str, Any]:
    """`rope_parameters`; takes `rope_theta` out of the config."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.pop("rope_theta", 10000.0)}
    rotated, width = keys.get("rope.dimension_count"), config.get("head_dim")
    width = width or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    if rotated and rotated < width and config.get("kv_lora_rank") is None:
        rope["partial_rotary_factor"] = rotated / width
    kind = keys.get("rope.scaling.type")
    factor = keys.get("rope.scaling.factor")
    if kind not in (None, "none") and factor not in (None, 1):
        rope |= {"rope_type": kind, "factor": factor}
    if rope["rope_type"] == "yarn":
        rope |= {**_yarn(keys), **names.yarn}
    if (spec := source.tensors.get(ROPE_FREQUENCIES)) is not None:
        rope |= _frequency_factors(spec, rope["rope_type"])
    return rope


def _yarn(keys: Keys) -> dict[str, Any]:
    """YaRN's parameters; what is not given has its usual value."""
    start = "rope.scaling."
    temperature = keys.get(f"{start}yarn_log_multiplier")
    mscale = None if not temperature else round(10 * temperature, 6)
    attention = keys.get(f"{start}attn_factor") or keys.get(f"{start}yarn_attn_factor")
    if attention not in (None, 1):
        raise UnsupportedModelError(
            f"key '{keys.architecture}.{start}attn_factor' = {attention} is not implemented"
        )
    found = {
        "original_max_position_embeddings": keys.get(f"{start}original_context_length"),
        "beta_fast": keys.get(f"{start}yarn_beta_fast"),
        "beta_slow": keys.get(f"{start}yarn_beta_slow"),
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }
    return {key: value for key, value in found.items() if value is not None}


def _frequency_factors(spec: TensorSpec, kind: str) -> dict[str, Any]:
    """What divides each frequency: how files store Llama 3's scaling."""
    if spec.dtype != "F32" or len(spec.shape) != 1 or kind != "default":
        raise CheckpointError(
            f"{spec.file}: tensor {shown(spec.name)}: wanted a row of F32 and no other scaling of"
            f" rope, found {spec.dtype} {list(spec.shape)} beside {kind}"
        )
    factors = read_tensor(spec).view(np.float32).tolist()
    return {"rope_type": "factors", "frequency_factors": factors}
