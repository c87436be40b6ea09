"""What the conformance suite runs over: the repository's own goldens and large fixtures.

The latter only where they lie beside the checkout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from colibri.models.registry import all_families

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests" / "goldens"
SHARED = ROOT.parent / "shared" / "fixtures"
KNOWN = {name for family in all_families() for name in (family.model_type, *family.aliases)}


@dataclass(frozen=True)
class Golden:
    """Prompt ids `[T]`, logits `[T, V]`, greedy ids, each layer's experts `[T, A]` (as sets)."""

    ids: np.ndarray
    logits: np.ndarray
    greedy_ids: list[int]
    routes: dict[int, np.ndarray]


def own_golden(family: Family) -> Golden:
    """The repository's golden of a family's tiny checkpoint."""
    stored = np.load(GOLDENS / f"{family.model_type}.npz")
    routes = {int(k.split(".")[1]): stored[k] for k in stored.files if k.startswith("router.")}
    return Golden(stored["ids"], stored["logits"], stored["greedy_ids"].tolist(), routes)


def shared_cases() -> list[Path]:
    """Folders of fixtures of every kind; empty where the checkout stands alone."""
    return sorted(path.parent for path in SHARED.glob("*/*/golden.safetensors"))


def model_type(case: Path) -> str:
    """The text part's model_type of a fixture."""
    config: dict[str, Any] = json.loads((case / "config.json").read_text())
    return str(config["model_type"])


def is_known(case: Path) -> bool:
    """Whether a family of ours claims the fixture."""
    return model_type(case) in KNOWN


def shared_golden(case: Path) -> Golden:
    """The golden of a fixture."""
    stored = load_file(case / "golden.safetensors")
    routes = {
        int(key.split(".")[2]): value.reshape(-1, value.shape[-1])
        for key, value in stored.items()
        if key.startswith("router.") and key.endswith(".topk_ids")
    }
    ids = stored["input_ids"].reshape(-1).astype(np.int32)
    logits = stored["logits"].reshape(len(ids), -1)
    return Golden(ids, logits, stored["greedy_ids"].reshape(-1).tolist(), routes)


def record_nbytes(family: Family) -> int:
    """Bytes of an expert of the tiny model, float32 gate, up and down."""
    layer = Blueprint.of(family.tiny_config()).expert_layers()[0]
    biases = 2 * layer.intermediate_size + layer.hidden_size if layer.biased else 0
    return 4 * (3 * layer.intermediate_size * layer.hidden_size + biases)


def is_sparse(path: Path) -> bool:
    """Whether a model has routed experts."""
    config = json.loads((path / "config.json").read_text())
    return bool(Blueprint.of(config).sparse_layers())


def least_slots(path: Path) -> int:
    """The fewest expert slots a model runs with: one layer's active experts."""
    config = json.loads((path / "config.json").read_text())
    sparse = Blueprint.of(config).sparse_layers()
    return max((demand.num_experts_per_tok for _, demand in sparse), default=0)
