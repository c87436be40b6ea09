#!/usr/bin/env python3
"""Measure how much each expert serves each domain of text, and write `experts.json`.

    python tools/atlas.py MODEL NAME=TEXTFILE NAME=TEXTFILE … [--tokens 16384] [--out FILE]

Routing is the model's own on the given text. The file, by default beside the model:

    {"schema": "colibri-experts-1",
     "model": {FILE: SHA-256, …}        the weights that were measured, where they have checksums
     "domains": [NAME, …]               D names
     "tokens": {NAME: N, …}             tokens that were routed
     "num_experts_per_tok": A
     "layers": {"0": {"counts": [[n, …], …]      [E][D] how often a token of the domain chose it
                      "affinity": [[x, …], …]    [E][D] share of each domain in the expert's load,
                                                 as if all domains had equally many tokens
                      "heat": [h, …]}, …}}       [E] its load over the mean load of the layer

A row of `affinity` sums to one, and is zero for an expert that no token chose.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri import LLM
from colibri.errors import ColibriError, SettingsError
from colibri.kernels.api import Routing
from colibri.models.description import Description

SCHEMA = "colibri-experts-1"
FILE_NAME = "experts.json"
Counts = NDArray[np.int64]  # [D, L, E]
Floats = NDArray[np.float64]


class RouteCounter:
    """Counts the experts that tokens chose: pass it as `routes=`.

    Attributes:
        layers: numbers of the MoE layers.
        counts: `[L, E]`.
        num_experts_per_tok: choices of a token in a layer.
    """

    def __init__(self, description: Description) -> None:
        found = description.blueprint.sparse_layers()
        if not found:
            raise SettingsError(f"{description.checkpoint.directory} has no experts to measure")
        self.layers = [layer for layer, _ in found]
        self.num_experts_per_tok = max(moe.num_experts_per_tok for _, moe in found)
        shape = (len(found), max(moe.num_experts for _, moe in found))
        self.counts: Counts = np.zeros(shape, np.int64)
        self._row = {layer: row for row, layer in enumerate(self.layers)}

    def __call__(self, layer: int, routing: Routing) -> None:
        """Add what the router said."""
        row = self.counts[self._row[layer]]
        row += np.bincount(routing.ids.ravel(), minlength=row.size)

    def take(self) -> Counts:
        """The counts so far; begins anew."""
        counts = self.counts.copy()
        self.counts[:] = 0
        return counts


def affinity(counts: Counts) -> Floats:
    """Share of each domain in each expert's load `[D, L, E]`, domains weighing the same."""
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    load = shares.sum(0, keepdims=True)
    share: Floats = np.divide(shares, load, out=np.zeros_like(shares), where=load > 0)
    return share


def heat(counts: Counts) -> Floats:
    """Load of each expert `[L, E]` over the layer's mean load, domains weighing the same."""
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    mean: Floats = shares.mean(0) * counts.shape[-1]
    return mean


def atlas(
    counter: RouteCounter,
    tokens: Mapping[str, int],
    counts: Counts,
    files: Mapping[str, str],
) -> dict[str, Any]:
    """The contents of `experts.json`; see the module."""
    share, load = affinity(counts), heat(counts)
    return {
        "schema": SCHEMA,
        "model": dict(files),
        "domains": list(tokens),
        "tokens": dict(tokens),
        "num_experts_per_tok": counter.num_experts_per_tok,
        "layers": {
            str(layer): {
                "counts": counts[:, row].T.tolist(),
                "affinity": share[:, row].T.round(4).tolist(),
                "heat": load[row].round(4).tolist(),
            }
            for row, layer in enumerate(counter.layers)
        },
    }


def weights_of(description: Description) -> dict[str, str]:
    """SHA-256 of the files of a container; nothing for a plain checkpoint."""
    container = description.checkpoint.container
    if container is None:
        return {}
    return {name: record.sha256 for name, record in container.manifest.files.items()}


def table(domains: Sequence[str], layers: Sequence[int], counts: Counts, best: int = 3) -> str:
    """A Markdown table: the experts of each layer that serve a domain most, with their share.

    Experts that carry less than a quarter of the mean load are left out.
    """
    share, load = affinity(counts), heat(counts)
    head = "| domain | " + " | ".join(f"layer {layer}" for layer in layers) + " |"
    lines = [head, "|---" * (len(layers) + 1) + "|"]
    for d, domain in enumerate(domains):
        cells = []
        for row in range(len(layers)):
            worth = np.where(load[row] >= 0.25, share[d, row], 0.0)
            top = np.argsort(-worth, kind="stable")[:best]
            cells.append(", ".join(f"{e} ({share[d, row, e]:.0%})" for e in top))
        lines.append(f"| {domain} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", nargs="+", metavar="NAME=TEXTFILE")
    parser.add_argument("--tokens", type=int, default=16384, help="of each domain, at most")
    parser.add_argument("--out", type=Path, help=f"default: MODEL/{FILE_NAME}")
    options = parser.parse_args()
    texts = dict(pair.split("=", 1) for pair in options.texts if "=" in pair)
    if len(texts) != len(options.texts):
        parser.error("texts are given as NAME=TEXTFILE, each name once")
    try:
        with LLM.open(options.model) as llm:
            found = measure(llm, texts, options.tokens)
    except (ColibriError, OSError, UnicodeDecodeError) as error:
        print(f"atlas: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, ColibriError) else 1
    write_json(options.out or options.model / FILE_NAME, found)
    return 0


def measure(llm: LLM, texts: Mapping[str, str], limit: int) -> dict[str, Any]:
    """Route each domain's text, in stretches as long as the context holds."""
    description = llm.prepared.description
    counter, counts, tokens = RouteCounter(description), [], {}
    for name, file in texts.items():
        ids = list(llm.encode(Path(file).read_text(encoding="utf-8")))[:limit]
        span = llm.plan().context_length
        for start in range(0, len(ids), span):
            llm.logits(ids[start : start + span], routes=counter)
        counts.append(counter.take())
        tokens[name] = len(ids)
        print(f"{name}: {len(ids)} tokens", file=sys.stderr, flush=True)
    stacked = np.stack(counts)
    print(table(list(tokens), counter.layers, stacked), file=sys.stderr)
    return atlas(counter, tokens, stacked, weights_of(description))


if __name__ == "__main__":
    raise SystemExit(main())
