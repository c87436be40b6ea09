"""GGUF files of tiny checkpoints, made by the official writer and named by its tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from colibri.checkpoint.config import normalize
from colibri.checkpoint.safetensors_writer import save_hf
from colibri.formats.ggml import BLOCK_TYPES
from colibri.models import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from colibri.models.blueprint import Blueprint
from colibri.models.registry import all_families
from tests.blocks import random_blocks

FLOATS = {"f32": 0, "f16": 1, "bf16": 30}
BLOCKS = {kind.name: kind for kind in BLOCK_TYPES}
ARCHITECTURES = {f.model_type: f.gguf[0].architecture for f in all_families() if f.gguf}
# What a tiny config says that files of the architecture cannot.
CHANGES: dict[str, dict[str, Any]] = {
    llama.FAMILY.model_type: {"attention_bias": False, "mlp_bias": False, "rope_scaling": None},
    mixtral.FAMILY.model_type: {"intermediate_size": 64, "sliding_window": None},
    qwen3.FAMILY.model_type: {
        "intermediate_size": 96,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
    },
    qwen3_moe.FAMILY.model_type: {"mlp_only_layers": [], "rope_scaling": None},
    qwen2_moe.FAMILY.model_type: {
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "shared_expert_intermediate_size": 64,
    },
    olmoe.FAMILY.model_type: {},
    glm4_moe.FAMILY.model_type: {},
    gpt_oss.FAMILY.model_type: {"swiglu_limit": 7.0},
    minimax_m2.FAMILY.model_type: {},
    deepseek_v2.FAMILY.model_type: {},
    deepseek_v3.FAMILY.model_type: {},
}
# Whether keys and values of latent attention stand apart, as they do in today's files.
SPLIT = {deepseek_v3.FAMILY.model_type}
SOFTMAX, SIGMOID = 1, 2
PERMUTED = {llama.FAMILY.model_type, mixtral.FAMILY.model_type}
# model_type -> (GGUF key below the architecture, config key)
KEYS = {
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.sliding_window": "sliding_window",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
}
Type = Callable[[str], str]  # a tensor's name in the file -> the type it gets


def tensors_of(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and all tensors of a checkpoint, as float32."""
    config = json.loads((directory / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        tensors |= load_file(path)
    return config, {name: value.astype(np.float32) for name, value in tensors.items()}


def gguf_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The same tensors as a converter of llama.cpp's would name, stack and permute them."""
    model_type = config["model_type"]
    names = gguf.get_tensor_name_map(
        {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[ARCHITECTURES[model_type]], 8
    )
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        parts = name.split(".experts.")
        if len(parts) == 2 and parts[1][0].isdigit():
            number, rest = parts[1].split(".", 1)
            stacks.setdefault(f"{parts[0]}.experts.{rest}", {})[int(number)] = value
            continue
        if model_type in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            heads = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            value = _permuted(value, config[heads])
        if name.endswith("shared_expert_gate.weight"):
            value = value.reshape(-1)
        if model_type in SPLIT and name.endswith("kv_b_proj.weight"):
            found |= _split(names, name, value, config)
            continue
        found[_named(names, name)] = value
    for name, experts in stacks.items():
        found[_named(names, name)] = np.stack([experts[i] for i in sorted(experts)])
    return found


def _split(
    names: Any, name: str, value: np.ndarray, config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Keys, turned, and values of each head."""
    nope, heads = config["qk_nope_head_dim"], config["num_attention_heads"]
    by_head = value.reshape(heads, -1, value.shape[-1])
    keys = np.ascontiguousarray(by_head[:, :nope].swapaxes(1, 2))
    stem = name.removesuffix("kv_b_proj.weight")
    return {
        _named(names, f"{stem}k_b_proj.weight"): keys,
        _named(names, f"{stem}v_b_proj.weight"): np.ascontiguousarray(by_head[:, nope:]),
    }


def _named(names: Any, name: str) -> str:
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if name.endswith(".sinks"):
        name += ".weight"
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head: those of its first half take turns with those of its second."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def metadata(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Keys of the file, without the tokenizer's, that say what config.json says."""
    start = ARCHITECTURES[config["model_type"]]
    read = Blueprint.of(config).config
    config = normalize(config)
    config = {**config, **config.get("rope_parameters", {})}
    config = {**config, "head_dim": read.head_width}
    own = {key: config[name] for key, name in KEYS.items() if config.get(name) is not None}
    found = {f"{start}.{key}": value for key, value in own.items()}
    found[f"{start}.block_count"] = config["num_hidden_layers"]
    found |= _further(start, config, getattr(read, "scoring_func", None))
    ids = {key: config.get(f"{key}_token_id") for key in ("bos", "eos")}
    found |= {f"tokenizer.ggml.{k}_token_id": v for k, v in ids.items() if v is not None}
    return found | more


def _further(start: str, config: Mapping[str, Any], scoring: str | None) -> dict[str, Any]:
    """Keys that say several config keys, or none."""
    found: dict[str, Any] = {}
    if scoring is not None:
        found["expert_gating_func"] = SIGMOID if scoring == "sigmoid" else SOFTMAX
    if share := config.get("partial_rotary_factor"):
        found["rope.dimension_count"] = int(share * config["head_dim"])
    if config.get("kv_lora_rank"):
        found |= _latent(config)
    if config.get("rope_type") == "yarn":
        scaling = {
            "type": "yarn",
            "factor": float(config["factor"]),
            "original_context_length": config["original_max_position_embeddings"],
        }
        scaling |= {f"yarn_{k}": config[k] for k in ("beta_fast", "beta_slow") if k in config}
        if "mscale_all_dim" in config:
            scaling["yarn_log_multiplier"] = 0.1 * config["mscale_all_dim"]
        found |= {f"rope.scaling.{key}": value for key, value in scaling.items()}
    return {f"{start}.{key}": value for key, value in found.items()}


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of heads as files say them whose keys and values are whole, or stand apart."""
    nope, rotated, value = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    sizes = {"key_length": nope + rotated, "value_length": value}
    found: dict[str, Any] = {"rope.dimension_count": rotated}
    if config["model_type"] in SPLIT:
        found |= {f"attention.{key}_mla": size for key, size in sizes.items()}
        rank = config["kv_lora_rank"]
        sizes = {"key_length": rank + rotated, "value_length": rank, "head_count_kv": 1}
    return found | {f"attention.{key}": size for key, size in sizes.items()}


def write_file(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, Any],
    split: int = 0,
) -> Path:
    """Write float32 arrays, or pairs of (bytes `[.., row]`, type) as they are."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in keys.items():
        _add(writer, key, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, "f32")
        number = BLOCKS[kind].number if kind in BLOCKS else FLOATS[kind]
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    kinds.get(type(value), writer.add_array)(key, value)


def coded(value: np.ndarray, kind: str) -> tuple[np.ndarray, str]:
    """A float32 array in a type that the package can write: floats, q4_0 to q8_0."""
    number = gguf.GGMLQuantizationType(BLOCKS[kind].number if kind in BLOCKS else FLOATS[kind])
    return gguf.quants.quantize(value, number), kind


def numbers(data: np.ndarray, kind: str) -> np.ndarray:
    """What bytes of a type stand for, by the package."""
    if kind == "f32":
        return data
    number = gguf.GGMLQuantizationType(BLOCKS[kind].number if kind in BLOCKS else FLOATS[kind])
    return np.asarray(gguf.quants.dequantize(data, number), np.float32)


def convert(
    directory: Path, path: Path, kind: Type, *, split: int = 0, **keys: Any
) -> tuple[Path, Path]:
    """A checkpoint as a GGUF file, and beside it as safetensors with the file's numbers.

    Matrices become what `kind` says of their name, f16 where blocks do not divide their rows; block
    types that the package cannot write get random codes.
    """
    config, tensors = tensors_of(directory)
    rng = np.random.default_rng(len(path.name))
    named = gguf_tensors(config, tensors)
    stored: dict[str, tuple[np.ndarray, str]] = {}
    exact: dict[str, np.ndarray] = {}
    for name, value in named.items():
        kept = kind(name) if _is_matrix(name, value) else "f32"
        if kept in BLOCKS and value.shape[-1] % BLOCKS[kept].block:
            kept = "f16"
        stored[name] = _stored(value, kept, rng)
        exact[name] = numbers(*stored[name]).reshape(value.shape)
    write_file(path, ARCHITECTURES[config["model_type"]], metadata(config, **keys), stored, split)
    original = path.parent / f"{path.stem}-original"
    save_hf(original, config, _back(config, tensors, exact), shards=1, dtype="f32")
    return path, original


def _is_matrix(name: str, value: np.ndarray) -> bool:
    return value.ndim > 1 and "ffn_gate_inp" not in name and not name.endswith(".bias")


def _stored(value: np.ndarray, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    if kind in ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"):
        return coded(value, kind)
    shape = (int(np.prod(value.shape[:-1])), value.shape[-1])
    blocks = random_blocks(rng, BLOCKS[kind], shape, float(value.std()))
    return blocks.reshape(*value.shape[:-1], -1), kind


def _back(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The original's tensors with the numbers of the file: its numbers, sent the same way, are."""
    places = {name: np.arange(value.size).reshape(value.shape) for name, value in tensors.items()}
    starts = dict(zip(places, np.cumsum([0, *(v.size for v in places.values())]), strict=False))
    sent = gguf_tensors(config, {n: places[n] + starts[n] for n in places})
    flat = np.empty(sum(value.size for value in tensors.values()), np.float32)
    for name, where in sent.items():
        flat[where.reshape(-1)] = exact[name].reshape(-1)
    return {
        name: flat[starts[name] : starts[name] + value.size].reshape(value.shape)
        for name, value in tensors.items()
    }
