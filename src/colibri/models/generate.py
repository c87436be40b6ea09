"""Random checkpoints of any family: its parameters, with deviations that keep activations sane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from colibri.checkpoint.byte_tokenizer import END_OF_TEXT, NUM_TOKENS
from colibri.checkpoint.config import normalize
from colibri.checkpoint.generate import RandomModel, RandomTensor, generate_checkpoint
from colibri.errors import UnsupportedModelError
from colibri.formats import BF16, I64, Format, FP8Format, MXFP4Format, get_format
from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from colibri.nn.parameter import Parameter
from colibri.nn.trunk import EMBEDDING, LM_HEAD

# What makes a tiny model peculiar and would only confuse a large one.
_TINY_ONLY = (
    *("mlp_only_layers", "mlp_layer_types", "first_k_dense_replace", "rope_parameters"),
    *("layer_types", "indexer_types", "use_sliding_window", "sliding_window"),
    "unpadded_vocab_size",
)
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_ABSORBED = ".kv_b_proj.weight"
_SHARD_BYTES = 64 << 20
_ROUTER_GAIN, _HEAD_GAIN = 2.0, 4.0  # choices and tokens that differ from step to step


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model, whatever its family.

    Attributes:
        hidden_size: D.
        expert_size: width F of an expert.
        num_experts: E.
        num_experts_per_tok: A.
        num_layers: all of them sparse.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        vocab_size: V.
    """

    hidden_size: int
    expert_size: int
    num_experts: int
    num_experts_per_tok: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


SHAPES: Mapping[str, ModelShape] = {
    "demo": ModelShape(512, 256, 32, 4, 10, 8, 4, 64, 264),
    "1gb": ModelShape(1024, 512, 64, 8, 18, 16, 4, 64, 264),
    "olmoe-7b": ModelShape(2048, 1024, 64, 8, 16, 16, 16, 128, 50304),
    "qwen3-30b": ModelShape(2048, 768, 128, 8, 48, 32, 4, 128, 151936),
    # Experts of GLM-5.2; four of its layers, plain attention and a smaller vocabulary.
    "glm-5.2": ModelShape(6144, 2048, 256, 8, 4, 64, 8, 128, 32768),
}


def shape_names() -> tuple[str, ...]:
    """What `shape_config` takes."""
    return ("tiny", *SHAPES)


def shape_config(family: Family, shape: str, num_layers: int | None = None) -> dict[str, Any]:
    """A config.json of that family and shape; `tiny` is the family's own smallest model.

    Raises:
        UnsupportedModelError: no such shape.
    """
    ends = {"bos_token_id": None, "eos_token_id": END_OF_TEXT}
    layers = {} if num_layers is None else {"num_hidden_layers": num_layers}
    if shape == "tiny":
        return _with_layer_types(family.tiny_config(**ends, **layers))
    if shape not in SHAPES:
        raise UnsupportedModelError(
            f"unknown shape {shape!r}: known are {', '.join(shape_names())}"
        )
    declared = {item.name for item in fields(family.config)}
    config = normalize(family.tiny_config(**ends))
    for key in _TINY_ONLY:
        config.pop(key, None)
    # One key for all heads, and heads that rotate nothing, are no sizes.
    fixed = {"num_key_value_heads": 1, "qk_rope_head_dim": 0}
    kept = {key: value for key, value in fixed.items() if config.get(key) == value}
    return {**config, **_sizes(SHAPES[shape], declared), **kept, **layers}


def _quantization_config(experts: Format, dense: Format) -> dict[str, Any]:
    """How a published checkpoint says that it is stored so."""
    if isinstance(dense, FP8Format):
        about = {"fmt": "e4m3", "activation_scheme": "dynamic"}
        block = {"weight_block_size": [dense.block, dense.block]}
        fp4 = {} if experts is dense else {"expert_dtype": "fp4"}
        return {"quant_method": "fp8", **about, **block, **fp4}
    if isinstance(experts, MXFP4Format):
        return {"quant_method": "mxfp4"}
    weights = {"num_bits": 4, "type": "int", "group_size": experts.group, "symmetric": True}
    weights |= {"strategy": "group", "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {**method, "quantization_status": "compressed", "config_groups": groups}


def _with_layer_types(config: dict[str, Any]) -> dict[str, Any]:
    """Repeat or cut lists of one kind a layer to the number of layers."""
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if kinds := config.get(key):
            count = config["num_hidden_layers"]
            config[key] = (kinds * (count // len(kinds) + 1))[:count]
    if "ple_layer_ids" in config:
        last = config["num_hidden_layers"]
        config["ple_layer_ids"] = [each for each in config["ple_layer_ids"] if each <= last]
    return config


def _sizes(size: ModelShape, declared: set[str]) -> dict[str, Any]:
    """Keys of the sizes, as far as the family's config has them."""
    by_width = "moe_intermediate_size" in declared
    values = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "rotary_dim": size.head_dim // 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 4 * size.head_dim,
        "q_lora_rank": size.hidden_size // 4,
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": size.head_dim // 2,
        "v_head_dim": size.head_dim,
        "index_n_heads": size.num_heads // 2,
        "index_head_dim": size.head_dim,
        "index_topk": 2048,
        "indexer_n_heads": size.num_heads // 2,
        "indexer_head_dim": size.head_dim,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
        "max_position_embeddings": 4096,
        "num_experts": size.num_experts,
        "num_experts_per_tok": size.num_experts_per_tok,
        "intermediate_size": size.expert_size * (size.num_experts_per_tok if by_width else 1),
        "moe_intermediate_size": size.expert_size,
        "shared_expert_intermediate_size": size.expert_size,
    }
    return {key: value for key, value in values.items() if key in declared}


def generate(
    directory: Path,
    config: Mapping[str, Any],
    *,
    experts: str = "int4-g64",
    dense: str = "bf16",
    seed: int = 0,
    published: bool = False,
    spelling: str | None = None,
    shards: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a random checkpoint of `config`: a container where `experts` is a coded format.

    Args:
        directory: made if need be.
        config: config.json's contents; it names the family.
        experts: format of routed experts.
        dense: format of dense matrices and embedding, where `experts` is coded; otherwise all
            tensors get the one of the experts. Norms, biases and routers are never coded.
        seed: of all weights.
        published: whether coded formats, too, are stored as they are published: fp8 with block
            scales, mxfp4, packed int4 (`int4-g32-bf16`). Embedding and output matrix stay floats.
        spelling: how experts are named on disk where they are no container's; None as the family
            publishes them.
        shards: files of such a checkpoint.
        progress: told bytes written and bytes in all.

    Raises:
        ConfigError, UnsupportedModelError: the config is not that of a known family, or an unknown
            format, or one that nobody publishes.
        CheckpointError: the disk is too small, or the directory holds other files.
    """
    fmt = get_format(experts)
    dense_format = fmt if fmt.is_plain else get_format(dense)
    blueprint = Blueprint.of(config)
    family = blueprint.family
    about: dict[str, Any] = {"dtype": _DTYPES[_plain(dense_format).name]}
    if published and not fmt.is_plain:
        about |= {"quantization_config": _quantization_config(fmt, dense_format)}
    named = (spelling or family.spelling) if published or fmt.is_plain else None
    tied, count = blueprint.trunk.tied, blueprint.demand.num_experts
    tensors = [
        tensor
        for each in blueprint.parameters()
        for tensor in _in_shards(_tensor(each, dense_format, tied, count), each.kind)
    ]
    model = RandomModel(
        config={**config, **about},
        family=family.model_type,
        dense=[_as_published(each, dense_format) for each in tensors] if published else tensors,
        layers=blueprint.expert_layers(),
        format=fmt,
        seed=seed,
        spelling=named,
    )
    generate_checkpoint(
        directory, model, unrename=family.unrename, shards=shards, progress=progress
    )


def _as_published(tensor: RandomTensor, dense: Format) -> RandomTensor:
    """Nobody codes embedding and output matrix; fp8 is taken for what is absorbed, too."""
    if tensor.name in (EMBEDDING, LM_HEAD):
        return replace(tensor, format=_plain(dense))
    return replace(tensor, format=dense) if tensor.name.endswith(_ABSORBED) else tensor


def _tensor(parameter: Parameter, dense: Format, tied: bool, num_experts: int) -> RandomTensor:
    """Deviations: rows of matrices have length one, and so keep the size of what they multiply."""
    name, shape = parameter.name, parameter.shape
    plain = _plain(dense)
    unit = shape[-1] ** -0.5
    match parameter.kind:
        case "norm":
            return RandomTensor(name, shape, plain, 0.1, mean=1.0)
        case "bias" | "centred_norm":
            return RandomTensor(name, shape, plain, 0.1)
        case "ids":
            return RandomTensor(name, shape, I64, 0.0, below=num_experts)
        case "filter" | "table":
            return RandomTensor(name, shape, plain, unit)
        case "router":
            return RandomTensor(name, shape, plain, _ROUTER_GAIN * unit)
        case "absorbed":
            return RandomTensor(name, shape, plain, unit)
        case "embedding":
            # Ids that the tokenizer does not have must never be the likeliest.
            return RandomTensor(name, shape, dense, 1.0, rows=NUM_TOKENS if tied else None)
    if name == LM_HEAD:
        return RandomTensor(name, shape, dense, _HEAD_GAIN * unit, rows=NUM_TOKENS)
    return RandomTensor(name, shape, dense, unit)


def _in_shards(tensor: RandomTensor, kind: str) -> list[RandomTensor]:
    """A table that stays on disk is published in shards, one of which is drawn at a time."""
    rows, columns = tensor.matrix
    step = max(1, _SHARD_BYTES // tensor.format.nbytes((1, columns)))
    if kind != "table" or rows <= step:
        return [tensor]
    stem = tensor.name.removesuffix("weight")
    return [
        replace(
            tensor,
            name=f"{stem}shard_{number}.weight",
            shape=(min(step, rows - first), columns),
        )
        for number, first in enumerate(range(0, rows, step))
    ]


def _plain(dense: Format) -> Format:
    """The format of what is never coded."""
    return dense if dense.is_plain else BF16
