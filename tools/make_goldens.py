"""Make or check the goldens of every family with transformers (extra `[oracle]`).

Usage: `python tools/make_goldens.py [--check] [FAMILY ...]`.

The checkpoints are those of `tests/tiny.py`, so only ids, logits and router choices are stored, in
`tests/goldens/NAME.npz`; logits of drafting heads in `NAME.mtp.npz`. Prompts are drawn until, over
prompt and continuation, the best two logits of every greedy step differ by 5e-3 and embeddings that
are off by 1e-4 choose the same experts: then exact ids are a fair demand. `long` of a
golden is the last row of a prompt of 1,500 tokens and what follows it. Fixtures with drafting
heads that lie beside the checkout get goldens of these by their folder's name.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from colibri.models.blueprint import Blueprint  # noqa: E402
from colibri.models.family import Family  # noqa: E402
from colibri.models.registry import all_families  # noqa: E402
from tests.tiny import num_heads, write_tiny  # noqa: E402

PROMPT, GREEDY, TRIALS = 32, 16, 1000
GREEDY_GAP, NOISE = 5e-3, 1e-4
LONG, LONG_GREEDY, LONG_NOISE = 1500, 4, 1e-6
_EXPERTS = re.compile(r"layers\.(\d+)\.(?:.*\.)?experts$")
GOLDENS = ROOT / "tests" / "goldens"
FIXTURES = ROOT.parent / "shared" / "fixtures" / "layout"


def load_oracle(directory: Path) -> Any:
    """The transformers model of a directory, float32, plain attention."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(directory)
    kind = AutoModelForCausalLM
    if type(config) not in AutoModelForCausalLM._model_mapping:
        kind, config.vision_config.depth = AutoModelForImageTextToText, 1  # its eyes stay shut
    model = kind.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def run(model: Any, ids: np.ndarray[Any, Any], noise: float = 0.0) -> tuple[Any, dict[int, Any]]:
    """Logits `[T, V]` and, for every sparse layer, its experts `[T, A]` as sets, ascending.

    `noise` is what embeddings are changed by, relative to their deviation.
    """
    import torch

    routed: dict[int, Any] = {}

    def hook(layer: int) -> Any:
        def keep(module: Any, inputs: Any, kwargs: Any) -> None:
            chosen = inputs[1] if len(inputs) > 1 else kwargs["top_k_index"]
            routed[layer] = np.sort(chosen.reshape(-1, chosen.shape[-1]).numpy(), axis=1)

        return keep

    def disturb(module: Any, inputs: Any, output: Any) -> Any:
        return output + noise * output.std() * torch.randn_like(output)

    handles = [model.get_input_embeddings().register_forward_hook(disturb)] if noise else []
    for name, module in model.named_modules():
        if found := _EXPERTS.search(name):
            keep = hook(int(found[1]))
            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    torch.manual_seed(0)
    with torch.no_grad():
        logits = model(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0].numpy()
    for handle in handles:
        handle.remove()
    return logits, routed


def same_routes(first: dict[int, Any], second: dict[int, Any]) -> bool:
    """Whether every token got the same experts."""
    return all(np.array_equal(first[layer], second[layer]) for layer in first)


def gap(row: np.ndarray[Any, Any]) -> float:
    """Difference of the two largest values."""
    second, first = np.sort(row)[-2:]
    return float(first - second)


def continued(model: Any, ids: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float] | None:
    """Greedy ids and the least gap on the way; None where a margin is too small."""
    whole, least = ids, np.inf
    for _ in range(GREEDY):
        logits, routed = run(model, whole)
        least = min(least, gap(logits[-1]))
        if least < GREEDY_GAP:
            return None
        whole = np.append(whole, np.int32(logits[-1].argmax()))
    safe = same_routes(routed, run(model, whole[:-1], NOISE)[1])
    return (whole[len(ids) :], least) if safe else None


def golden_of(model: Any, ids: np.ndarray[Any, Any]) -> dict[str, Any] | None:
    """`ids`, `logits`, `greedy_ids`, `greedy_gap`, `router.{layer}`; None for unsafe margins."""
    found = continued(model, ids)
    if found is None:
        return None
    logits, routed = run(model, ids)
    return {
        "ids": ids,
        "logits": logits,
        "greedy_ids": found[0],
        "greedy_gap": np.float32(found[1]),
        **{f"router.{layer}": chosen.astype(np.int16) for layer, chosen in routed.items()},
    }


def make(family: Family, directory: Path) -> dict[str, Any]:
    """The golden of the first prompt with safe margins."""
    model = load_oracle(write_tiny(directory, family))
    vocab_size = Blueprint.of(family.tiny_config()).config.num_ids
    for trial in range(TRIALS):
        ids = np.random.RandomState(trial).randint(3, vocab_size, PROMPT).astype(np.int32)
        if (found := golden_of(model, ids)) is not None:
            return found
    raise SystemExit(f"{family.model_type}: no prompt with safe margins in {TRIALS} trials")


def check(family: Family, directory: Path) -> dict[str, Any]:
    """The golden of the stored prompt, compared with what is stored.

    Ids exactly, logits within what transformers' own kernels differ by.
    """
    stored = np.load(GOLDENS / f"{family.model_type}.npz")
    found = golden_of(load_oracle(write_tiny(directory, family)), stored["ids"])
    if found is None:
        raise SystemExit(f"{family.model_type}: the stored prompt has unsafe margins; re-make it")
    for key, value in found.items():
        same = (
            np.allclose(value, stored[key], atol=1e-4)
            if value.dtype == np.float32
            else np.array_equal(value, np.sort(stored[key]) if "router" in key else stored[key])
        )
        if not same:
            raise SystemExit(
                f"{family.model_type}: {key} differs from tests/goldens; re-make them and say why"
            )
    return found


def long_golden(family: Family, directory: Path) -> dict[str, Any]:
    """`seed` of a prompt of `LONG` tokens, logits `[V]` behind it, and greedy ids that follow."""
    model = load_oracle(write_tiny(directory, family, max_position_embeddings=2 * LONG))
    vocab_size = Blueprint.of(family.tiny_config()).config.num_ids
    for seed in range(TRIALS):
        ids = long_prompt(seed, vocab_size)
        logits, routed = run(model, ids)
        if not same_routes(routed, run(model, ids, LONG_NOISE)[1]):
            continue
        greedy, whole = [], ids
        for _ in range(LONG_GREEDY):
            row = run(model, whole)[0][-1]
            greedy.append(int(row.argmax()) if gap(row) >= GREEDY_GAP else -1)
            whole = np.append(whole, np.int32(row.argmax()))
        if -1 not in greedy:
            last, ids_after = logits[-1], np.array(greedy, np.int32)
            return {"seed": np.int32(seed), "logits": last, "greedy_ids": ids_after}
    raise SystemExit(f"{family.model_type}: no long prompt with safe margins")


def long_prompt(seed: int, vocab_size: int) -> np.ndarray[Any, Any]:
    """The prompt of a long golden."""
    return np.random.RandomState(seed).randint(3, vocab_size, LONG).astype(np.int32)


def load_heads(model: Any, count: int) -> Any:
    """The drafting heads of a loaded model; what its config does not say of them is filled in."""
    from transformers.modeling_layers import MtpModel

    config = model.config.get_text_config()
    config.num_mtp_layers = count
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = ["full_attention"] * count
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mtp_mlp_layer_types = ["sparse"] * count
    if getattr(config, "indexer_types", None) is not None:
        config.indexer_types = ["full"] * count
    behind = range(config.num_hidden_layers, config.num_hidden_layers + count)
    names = [rf"^model\.layers\.{number}\..*" for number in behind]
    model._keys_to_ignore_on_load_unexpected = [*names, r"^mtp.*"]
    heads = MtpModel.from_pretrained(model).eval()
    for layer in heads.layers:  # some blocks return what they selected beside the state
        layer.mtp_block.register_forward_hook(
            lambda module, inputs, output: output[0] if isinstance(output, tuple) else output
        )
    return heads


def head_golden(directory: Path, ids: np.ndarray[Any, Any], count: int) -> dict[str, Any]:
    """`ids`, and `logits.K [T - 1 - K, V]` of each drafting head, teacher-forced."""
    import torch

    model = load_oracle(directory)
    tokens = torch.tensor(ids[None].astype(np.int64))
    found = {"ids": ids}
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True, use_cache=False).hidden_states[-1]
        heads = load_heads(model, count)
        for number in range(count):
            states, following = states[:, :-1], tokens[:, number + 1 :]
            positions = torch.arange(number + 1, tokens.shape[1])[None]
            states = heads.forward_layer(number, states, positions, None, input_ids=following)
            found[f"logits.{number}"] = heads._project_to_logits(states)[0].numpy()
    return found


def heads_of(family: Family, directory: Path, check_only: bool) -> None:
    """Make or check the golden of a family's drafting heads."""
    count = num_heads(family)
    ids = np.load(GOLDENS / f"{family.model_type}.npz")["ids"]
    made = head_golden(write_tiny(directory, family, heads=count), ids, count)
    keep(GOLDENS / f"{family.model_type}.mtp.npz", made, check_only)


def keep(path: Path, made: dict[str, Any], check_only: bool) -> None:
    """Write a golden, or compare it with what is stored."""
    if not check_only:
        np.savez_compressed(path, **made)
        return
    stored = np.load(path)
    if not all(np.allclose(value, stored[key], atol=1e-4) for key, value in made.items()):
        raise SystemExit(f"{path.name} differs from what transformers computes")


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
            made = (check if wanted.check else make)(family, Path(folder))
        if not wanted.check:
            np.savez_compressed(GOLDENS / f"{family.model_type}.npz", **made)
        with tempfile.TemporaryDirectory() as folder:
            long = long_golden(family, Path(folder))
        keep(GOLDENS / f"{family.model_type}.long.npz", long, wanted.check)
        if family.mtp:
            with tempfile.TemporaryDirectory() as folder:
                heads_of(family, Path(folder), wanted.check)
        verb = "agrees" if wanted.check else "made"
        print(f"{family.model_type}: {verb}, least greedy gap {float(made['greedy_gap']):.4f}")
    if not wanted.families:
        for case in sorted(FIXTURES.glob("*-mtp")):
            ids = np.random.RandomState(0).randint(3, 512, PROMPT).astype(np.int32)
            keep(GOLDENS / f"{case.name}.npz", head_golden(case, ids, 1), wanted.check)


if __name__ == "__main__":
    main()
