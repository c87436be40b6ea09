"""Make or check the goldens of every family with transformers (extra `[oracle]`).

Usage: `python tools/make_goldens.py [--check] [FAMILY ...]`.

The checkpoints are those of `tests/tiny.py`, so only ids, logits and router choices are stored, in
`tests/goldens/NAME.npz`. Prompts are drawn until, over prompt and continuation, the best two logits
of every greedy step differ by 5e-3 and the last chosen and first rejected expert by 3e-4 of
probability: then exact ids are a fair demand.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from colibri.models.family import Family  # noqa: E402
from colibri.models.registry import all_families  # noqa: E402
from tests.tiny import write_tiny  # noqa: E402

PROMPT, GREEDY, TRIALS = 32, 16, 1000
GREEDY_GAP, EXPERT_GAP = 5e-3, 3e-4
GOLDENS = ROOT / "tests" / "goldens"


def load_oracle(directory: Path) -> Any:
    """The transformers model of a directory, float32, plain attention."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def run(model: Any, ids: np.ndarray[Any, Any]) -> tuple[Any, list[tuple[int, Any]]]:
    """Logits `[T, V]` and, for every sparse layer, its router's probabilities `[T, E]`."""
    import torch

    routed: list[tuple[int, Any]] = []

    def hook(layer: int) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
            probabilities = torch.softmax(hidden @ module.weight.T, -1)
            routed.append((layer, probabilities.numpy()))

        return keep

    handles = []
    for index, layer in enumerate(model.model.layers):
        gate = getattr(layer.mlp, "gate", None)
        if gate is not None and hasattr(layer.mlp, "experts"):
            handles.append(gate.register_forward_hook(hook(index)))
    with torch.no_grad():
        logits = model(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0].numpy()
    for handle in handles:
        handle.remove()
    return logits, routed


def gap(sorted_values: np.ndarray[Any, Any], rank: int) -> float:
    """Least difference between the values at `rank - 1` and `rank` of rows sorted descending."""
    return float((sorted_values[:, rank - 1] - sorted_values[:, rank]).min())


def make(family: Family, directory: Path) -> dict[str, Any]:
    """Golden arrays of a family: `ids`, `logits`, `greedy_ids`, `greedy_gap`, `router.{layer}`."""
    model = load_oracle(write_tiny(directory, family))
    config = family.tiny_config()
    active = config["num_experts_per_tok"]
    for trial in range(TRIALS):
        ids = np.random.RandomState(trial).randint(3, config["vocab_size"], PROMPT).astype(np.int32)
        whole = ids
        gaps: list[float] = []
        for _ in range(GREEDY):
            logits, routed = run(model, whole)
            gaps.append(gap(-np.sort(-logits[-1:], axis=1), 1))
            expert_gaps = [gap(-np.sort(-p, axis=1), active) for _, p in routed]
            if gaps[-1] < GREEDY_GAP or min(expert_gaps) < EXPERT_GAP:
                break
            whole = np.append(whole, np.int32(logits[-1].argmax()))
        if min(gaps) < GREEDY_GAP or min(expert_gaps) < EXPERT_GAP:
            continue
        logits, routed = run(model, ids)
        found = {
            "ids": ids,
            "logits": logits,
            "greedy_ids": whole[PROMPT:],
            "greedy_gap": np.float32(min(gaps)),
        }
        return found | {
            f"router.{i}": np.argsort(-p, axis=1, kind="stable")[:, :active].astype(np.int16)
            for i, p in routed
        }
    raise SystemExit(f"{family.model_type}: no prompt with safe margins in {TRIALS} trials")


def check(family: Family, made: dict[str, Any]) -> None:
    """Compare with the stored goldens.

    Ids exactly, logits within what transformers' own kernels differ by.
    """
    stored = np.load(GOLDENS / f"{family.model_type}.npz")
    for key, value in made.items():
        same = (
            np.allclose(value, stored[key], atol=1e-4)
            if value.dtype == np.float32
            else np.array_equal(value, stored[key])
        )
        if not same:
            raise SystemExit(
                f"{family.model_type}: {key} differs from tests/goldens; re-make them and say why"
            )


def main() -> None:
    """Make or check the goldens of the families named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--check", action="store_true")
    wanted = parser.parse_args()
    GOLDENS.mkdir(exist_ok=True)
    for family in all_families():
        if wanted.families and family.model_type not in wanted.families:
            continue
        with tempfile.TemporaryDirectory() as folder:
            made = make(family, Path(folder))
        if wanted.check:
            check(family, made)
        else:
            np.savez_compressed(GOLDENS / f"{family.model_type}.npz", **made)
        verb = "agrees" if wanted.check else "made"
        print(f"{family.model_type}: {verb}, least greedy gap {float(made['greedy_gap']):.4f}")


if __name__ == "__main__":
    main()
