"""Stretches of held-out text that are scored, and figures about the use of experts; NumPy only.

Shapes: D domains, L layers, E experts, W windows, T positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.demo.ngram import ORDER, Ngram

CONTEXT = 512
"""Positions that only give context before the CONTEXT that are scored."""


def windows(tokens: NDArray[np.uint16], limit: int) -> NDArray[np.int64]:
    """At most `limit` stretches [W, 2 * CONTEXT + 1], evenly spaced, scored parts disjoint."""
    span = 2 * CONTEXT + 1
    rows = max(1, min(limit, (len(tokens) - span) // CONTEXT + 1))
    starts = np.linspace(0, len(tokens) - span, rows).astype(int)
    return np.stack([tokens[s : s + span].astype(np.int64) for s in starts])


def ngram_loss(ngram: Ngram, rows: NDArray[np.int64]) -> float:
    """Loss of the n-gram model on the scored positions of rows [W, T], nats a token."""
    first = CONTEXT + 1 - (ORDER - 1)
    return float(np.mean([ngram.loss(row[first:].astype(np.uint16)) for row in rows]))


def balance(usage: NDArray[np.float64]) -> dict[str, Any]:
    """Evenness of the load: usage [D, L, E], each [D, L] summing to one, domains equal."""
    heat = usage.mean(0) * usage.shape[2]
    shares = usage / np.maximum(usage.sum(0, keepdims=True), 1e-12)
    entropy = -(shares * np.log(np.maximum(shares, 1e-12))).sum(0)
    return {
        "coefficient_of_variation": [float(v) for v in heat.std(1)],
        "mean_coefficient_of_variation": float(heat.std(1).mean()),
        "max_over_mean": float(heat.max()),
        "min_over_mean": float(heat.min()),
        "within_domain_coefficient_of_variation": float((usage * usage.shape[2]).std(2).mean()),
        "domains_an_expert_serves": float(np.exp(entropy).mean()),
    }
