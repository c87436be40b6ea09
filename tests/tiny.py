"""Tiny seeded checkpoints of any family in any spelling: what goldens and tests run on.

Weights come from `numpy.random.RandomState`, whose stream is frozen, one generator a tensor
(seeded by the tensor's name), and are rounded to multiples of 2^-12, so that float32 and every
library agree on them exactly.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri.checkpoint.experts import ExpertLayer
from colibri.checkpoint.safetensors_writer import save_hf
from colibri.models import mixtral
from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from colibri.models.hybrid import HybridConfig
from colibri.models.registry import all_families
from colibri.nn.parameter import Parameter

FAMILIES = all_families()
SPARSE = tuple(f for f in FAMILIES if Blueprint.of(f.tiny_config()).sparse_layers())
PLAIN = mixtral.FAMILY  # where any family serves: nothing but sparse layers
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
each_sparse = pytest.mark.parametrize("family", SPARSE, ids=lambda family: family.model_type)

SPELLINGS = ("per-expert", "w1w3w2", "fused")
_ONE_LEVEL_UP = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}
_STD = {
    "matrix": 1.0,
    "router": 1.5,
    "embedding": 8.0,
    "filter": 1.0,
    "absorbed": 1.0,
    "table": 8.0,
}  # times K^-1/2


def tensor(
    name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, seed: int = 0
) -> np.ndarray:
    """Seeded float32 values, multiples of 2^-12."""
    random = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    values = mean + std * random.standard_normal(shape)
    return (np.round(values * 4096) / 4096).astype(np.float32)


def dense_tensors(blueprint: Blueprint, seed: int = 0) -> dict[str, np.ndarray]:
    """Every dense tensor by our name."""
    return {p.name: _dense(p, seed) for p in blueprint.parameters()}


def _dense(parameter: Parameter, seed: int) -> np.ndarray:
    if parameter.kind == "norm":
        return tensor(parameter.name, parameter.shape, 0.1, 1.0, seed)
    if parameter.kind == "ids":
        return _ids(parameter, seed)
    if parameter.kind in ("bias", "centred_norm"):
        return tensor(parameter.name, parameter.shape, 0.1, 0.0, seed)
    std = 2.0 if parameter.name == "lm_head.weight" else _STD[parameter.kind]
    return tensor(parameter.name, parameter.shape, std * parameter.shape[-1] ** -0.5, 0.0, seed)


def _ids(parameter: Parameter, seed: int) -> np.ndarray:
    """A row of different ids below eight for each token."""
    order = tensor(parameter.name, (parameter.shape[0], 8), 1.0, 0.0, seed).argsort(axis=1)
    return order[:, : parameter.shape[1]].astype(np.int64)


def expert_tensors(
    blueprint: Blueprint, spelling: str = "per-expert", seed: int = 0
) -> dict[str, np.ndarray]:
    """Every routed expert's matrices, spelled as asked; the numbers stay the same."""
    found: dict[str, np.ndarray] = {}
    for layer in blueprint.expert_layers():
        d, f = layer.hidden_size, layer.intermediate_size
        shapes = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
        parts: dict[str, list[np.ndarray]] = {name: [] for name in shapes}
        for expert in range(layer.num_experts):
            for name, shape in shapes.items():
                key = f"{layer.prefix}.{expert}.{name}.weight"
                parts[name].append(tensor(key, shape, shape[1] ** -0.5, 0.0, seed))
        biases: dict[str, list[np.ndarray]] = {}
        if layer.biased:
            for name, (rows, _) in shapes.items():
                keys = [f"{layer.prefix}.{e}.{name}.bias" for e in range(layer.num_experts)]
                biases[name] = [tensor(key, (rows,), 0.1, 0.0, seed) for key in keys]
        found |= (
            _fused(layer, parts, biases)
            if spelling == "fused"
            else {
                **_separate(layer, parts, spelling, "weight"),
                **_separate(layer, biases, spelling, "bias"),
            }
        )
    return found


def _fused(
    layer: ExpertLayer, parts: dict[str, list[np.ndarray]], biases: dict[str, list[np.ndarray]]
) -> dict[str, np.ndarray]:
    """All experts of a part, or of gate and up, in one tensor, as the family stores them."""

    def together(of: dict[str, list[np.ndarray]]) -> np.ndarray:
        pair = [np.stack(of["gate_proj"]), np.stack(of["up_proj"])]
        whole = np.stack(pair, axis=2) if layer.interleaved else np.stack(pair, axis=1)
        return whole.reshape(len(whole), -1, *whole.shape[3:])

    def turned(of: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(of.swapaxes(1, 2)) if layer.transposed else of

    found = {
        f"{layer.prefix}.gate_up_proj": turned(together(parts)),
        f"{layer.prefix}.down_proj": turned(np.stack(parts["down_proj"])),
    }
    if biases:
        found[f"{layer.prefix}.gate_up_proj_bias"] = together(biases)
        found[f"{layer.prefix}.down_proj_bias"] = np.stack(biases["down_proj"])
    return found


def _separate(
    layer: ExpertLayer, parts: dict[str, list[np.ndarray]], spelling: str, kind: str
) -> dict[str, np.ndarray]:
    """A tensor a part of an expert."""
    names = (
        {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        if spelling == "w1w3w2"
        else {n: n for n in parts}
    )
    return {
        f"{layer.prefix}.{e}.{names[n]}.{kind}": w
        for n, ws in parts.items()
        for e, w in enumerate(ws)
    }


def stacked(tensors: dict[str, np.ndarray], family: Family) -> dict[str, np.ndarray]:
    """Matrices that the family publishes in a stack, in one."""
    for division in family.divide:
        if len(division.ours) > 1:
            continue
        before, behind = map(re.escape, division.ours[0].split("{}"))
        stacks: dict[str, dict[int, str]] = {}
        for name in tensors:
            if found := re.fullmatch(rf"(.*){before}(\d+){behind}", name):
                stacks.setdefault(found[1] + division.theirs, {})[int(found[2])] = name
        for whole, parts in stacks.items():
            tensors[whole] = np.stack([tensors.pop(parts[i]) for i in sorted(parts)])
    return tensors


def write_tiny(
    directory: Path,
    family: Family,
    *,
    spelling: str | None = None,
    shards: int = 2,
    dtype: str = "f32",
    seed: int = 0,
    heads: int = 0,
    **changes: Any,
) -> Path:
    """Write the family's tiny checkpoint and return its directory.

    It is spelled as published unless asked otherwise; `heads` draft further tokens.
    """
    config = family.tiny_config(**changes)
    blueprint = Blueprint.of(config)
    if heads:
        blueprint = blueprint.with_heads(heads)
        config = {**config, "num_nextn_predict_layers": heads}
    tensors = dense_tensors(blueprint, seed) | expert_tensors(
        blueprint, spelling or family.spelling, seed
    )
    tensors = stacked(tensors, family)
    for ours, theirs in family.unrename:
        tensors = {name.replace(ours, theirs): value for name, value in tensors.items()}
    tensors = {_published(name, blueprint): value for name, value in tensors.items()}
    save_hf(directory, config, tensors, shards=shards, dtype=dtype)
    return directory


def num_heads(family: Family) -> int:
    """Drafting heads of the tiny model: one where its tensors lie one level up, else two."""
    return 1 if issubclass(family.config, HybridConfig) else 2 * family.mtp


def _published(name: str, blueprint: Blueprint) -> str:
    """Drafting heads stand behind the last layer, or under `mtp` where there is but one."""
    found = re.match(r"mtp\.layers\.(\d+)\.(.*)", name)
    if found is None:
        return name
    if len(blueprint.heads) > 1:
        return f"model.layers.{len(blueprint.layers) + int(found[1])}.{found[2]}"
    for ours, theirs in _ONE_LEVEL_UP.items():
        if found[2].startswith(f"{ours}."):
            return f"mtp.{theirs}{found[2].removeprefix(ours)}"
    return name
