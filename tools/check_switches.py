"""Compare random configs of every family with transformers (extra `[oracle]`).

Usage: `python tools/check_switches.py [--configs N] [--seed S] [FAMILY ...]`.

Goldens show one config a family; here every switch that a family's config declares is thrown at
random (head and expert ratios, norms, biases, windows, patterns of layers, rope kinds, ties), and
the logits must be those of transformers. A line names each config that differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from colibri.llm import LLM  # noqa: E402
from colibri.models.family import Family  # noqa: E402
from colibri.models.registry import all_families  # noqa: E402
from tests.tiny import write_tiny  # noqa: E402

POSITIONS = 256
TOLERANCE = 2e-4  # of the largest |logit|


def oracle_logits(directory: Path, ids: list[int]) -> Any:
    """What transformers computes, float32, plain attention and plain experts: `[T, V]`."""
    import torch
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **plain)
    with torch.no_grad():
        return model.eval()(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def draw_rope(draw: random.Random) -> dict[str, Any]:
    """One kind of rope with the keys that it reads."""
    kind = draw.choice(["default", "linear", "dynamic", "yarn", "llama3"])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice([1e4, 5e5])}
    if kind != "default":
        rope["factor"] = draw.choice([1.0, 1.5, 4.0])
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = draw.choice([32, 64, 128])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        optional = {"mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 16.0, "beta_slow": 2.0}
        optional |= {"attention_factor": 0.9, "truncate": False}
        rope |= {key: value for key, value in optional.items() if draw.random() < 0.35}
    return rope


def draw_config(family: Family, draw: random.Random) -> dict[str, Any]:
    """A complete config.json; of the optional keys those that the family declares."""
    heads, layers, experts = draw.choice([1, 2, 6]), draw.choice([1, 2, 4]), draw.choice([2, 9, 40])
    width = draw.choice([8, 16, 24])
    known = {item.name for item in fields(family.config)}
    tiny = family.tiny_config()
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([k for k in (1, 2, 3, 6) if heads % k == 0]),
        "hidden_size": heads * width,
        "head_dim": width,
        "num_hidden_layers": layers,
        "vocab_size": draw.choice([77, 130, 512]),
        "num_experts": experts,
        "num_experts_per_tok": draw.choice([1, 2, min(17, experts)]),
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": draw.choice([1e-6, 1e-2]),
        "tie_word_embeddings": draw.random() < 0.3 and "d_rel" not in known,
    }
    switches: dict[str, list[Any]] = {
        "intermediate_size": [24, 33, 100],
        "moe_intermediate_size": [16, 65],
        "shared_expert_intermediate_size": [8, 33, 128],
        "norm_topk_prob": [True, False],
        "attention_bias": [True, False],
        "qkv_bias": [True, False],
        "clip_qkv": [None, 0.5, 4.0],
        "sliding_window": [2, 16],
        "use_sliding_window": [True, False],
        "max_window_layers": [0, 1, 28],
        "decoder_sparse_step": [1, 1, 2],
        "mlp_only_layers": [[], [0], [layers - 1, 99]],
    }
    switches |= OF_INDEXED_STREAMS | OF_RELATIVE_BIASES
    drawn = {key: draw.choice(values) for key, values in switches.items() if key in known}
    drawn |= draw_layers(tiny, drawn, layers, draw)
    spelled = ("num_local_experts", "n_routed_experts", "num_experts", "layer_types")
    kept = {k: v for k, v in tiny.items() if k not in (*spelled, "rope_scaling", "rope_theta")}
    for name in spelled[:2]:
        if name in tiny:
            sizes[name] = sizes.pop("num_experts")
    rope: dict[str, Any] = {"rope_parameters": draw_rope(draw)}
    if "partial_rotary_factor" in tiny or "d_rel" in known:  # too few dims to scale, or none
        rope = {"rope_theta": draw.choice([1e4, 5e5])}
    return {**kept, **sizes, **drawn, **rope}


# Keys that only some families have; each of them is drawn where a family declares it.
OF_RELATIVE_BIASES: dict[str, list[Any]] = {
    "swa_num_attention_heads": [2, 6],
    "swa_num_key_value_heads": [1, 2],
    "swa_head_dim": [8, 24],
    "sliding_window_size": [2, 8, 40],
    "rel_extent": [1, 16, 100],
    "d_rel": [1, 5, 16],
    "log_scaling_n_floor": [None, 8],
    "conv_kernel_size": [2, 4],
    "n_shared_experts": [1, 2, 3],
    "route_scale": [1.0, 8.0],
    "unpadded_vocab_size": [None, 70],
}
OF_INDEXED_STREAMS: dict[str, list[Any]] = {
    "hc_count": [2, 3, 4],
    "hc_lowrank": [4, 17],
    "indexer_head_dim": [8, 16],
    "indexer_compress_ratio": [1, 2, 16],
    "indexer_budget": [16, 32],
    "ple_embed_dim": [24, 48],
    "ple_conv_kernel_size": [2, 4],
    "ngram_size": [2, 3, 4],
    "heads_per_ngram": [1, 2],
    "output_gate_type": [None, "sigmoid"],
}


def draw_layers(
    tiny: dict[str, Any], drawn: dict[str, Any], layers: int, draw: random.Random
) -> dict[str, Any]:
    """Kinds of layers, out of those of the tiny model, and what goes by them."""
    found: dict[str, Any] = {
        key: [draw.choice(tiny[key]) for _ in range(layers)]
        for key in ("layer_types", "mlp_layer_types")
        if key in tiny and ("hc_count" in drawn or "d_rel" in drawn)
    }
    if "ple_layer_ids" in tiny:  # embeddings stand before linear layers, and one layer is another
        found["layer_types"][0] = "indexed_attention"
        linear = [i + 1 for i, kind in enumerate(found["layer_types"]) if kind.startswith("linear")]
        found["ple_layer_ids"] = [i for i in linear if draw.random() < 0.7]
    return found


class Variant:
    """A family whose tiny config is another one; what `write_tiny` asks of a family."""

    def __init__(self, family: Family, config: dict[str, Any]) -> None:
        self.spelling, self.unrename = family.spelling, family.unrename
        self.divide = family.divide
        self.tiny_config = lambda: config


def difference(family: Family, config: dict[str, Any], draw: random.Random) -> float:
    """Largest difference of the logits, relative to the largest |logit|."""
    count = draw.choice([5, 40, 70])
    num_ids = config.get("unpadded_vocab_size") or config["vocab_size"]
    ids = [draw.randrange(num_ids) for _ in range(count)]
    exact: dict[str, Any] = {
        "activations": "float32",
        "kv": "f32",
        "prefill_chunk": draw.choice([1, 7, 512]),
    }
    with tempfile.TemporaryDirectory() as folder:
        directory = write_tiny(Path(folder), Variant(family, config))  # type: ignore[arg-type]
        with LLM.open(directory, **exact) as llm:
            ours = llm.logits(ids)
        wanted = oracle_logits(directory, ids)
    return float(np.abs(ours - wanted).max() / np.abs(wanted).max())


def main() -> None:
    """Check the families named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--configs", type=int, default=25, help="of each family")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    failed = 0
    for family in all_families():
        if wanted.families and family.model_type not in wanted.families:
            continue
        worst = 0.0
        for number in range(wanted.configs):
            draw = random.Random(f"{family.model_type} {wanted.seed} {number}")
            config = draw_config(family, draw)
            found = difference(family, config, draw)
            worst = max(worst, found)
            if not found < TOLERANCE:
                failed += 1
                print(f"{family.model_type} {number}: logits differ by {found:.1e} with {config}")
        print(f"{family.model_type}: {wanted.configs} configs, worst difference {worst:.1e}")
    if failed:
        raise SystemExit(f"{failed} configs differ from transformers")


if __name__ == "__main__":
    main()
