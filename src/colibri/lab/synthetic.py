"""Made-up routing that behaves like that of models: skewed, sticky and of changing subject.

Independent uniform choices would make every policy score the same, so nothing could be learnt from
them. Here each domain has its own popularity of experts (Zipf), a token keeps some of the experts
of the one before it, and the domain changes now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colibri.lab.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How to make a trace.

    Attributes:
        num_tokens: tokens T.
        num_layers: MoE layers L.
        num_experts: experts E of a layer.
        active: experts A of a token in a layer.
        zipf: exponent s of the popularity 1 / rank^s; 0 is flat.
        stickiness: chance that an expert of the token before is kept.
        num_domains: different popularities.
        domain_tokens: tokens after which the domain changes, on average.
        seed: makes it repeatable.
    """

    num_tokens: int = 400
    num_layers: int = 4
    num_experts: int = 16
    active: int = 2
    zipf: float = 1.0
    stickiness: float = 0.3
    num_domains: int = 3
    domain_tokens: float = 100.0
    seed: int = 0


def make_trace(routing: Routing) -> Trace:
    """A trace of one token a pass, as decoding makes it."""
    random = np.random.default_rng(routing.seed)
    T, L, E, A = routing.num_tokens, routing.num_layers, routing.num_experts, routing.active
    ranks = np.argsort(random.random((routing.num_domains, L, E)), axis=2) + 1
    liking = -routing.zipf * np.log(ranks)  # logarithm of the popularity
    changes = np.cumsum(random.random(T) < 1 / routing.domain_tokens)
    domains = random.integers(0, routing.num_domains, int(changes[-1]) + 1)[changes]
    ids = np.empty((T, L, A), np.int32)
    for token in range(T):
        # The A largest of log p + Gumbel noise are a draw without replacement.
        draw = liking[domains[token]] + random.gumbel(size=(L, E))
        if token:
            _keep(draw, ids[token - 1], random.random((L, A)) < routing.stickiness)
        ids[token] = np.argsort(-draw, axis=1)[:, :A]
    weights = np.sort(random.dirichlet(np.ones(A), T * L).astype(np.float32))[:, ::-1]
    numbers = np.arange(T, dtype=np.int32)
    return Trace(
        num_layers=L,
        num_experts=E,
        record_bytes=1,
        passes=np.repeat(numbers, L),
        positions=np.repeat(numbers, L),
        tokens=np.repeat(random.integers(0, 1000, T).astype(np.int32), L),
        rows=np.tile(np.arange(L, dtype=np.int32), T),
        ids=ids.reshape(T * L, A),
        weights=weights,
    )


def _keep(draw: NDArray[np.float64], before: NDArray[np.int32], kept: NDArray[np.bool_]) -> None:
    """Make the experts that are kept come first."""
    rows, columns = np.nonzero(kept)
    draw[rows, before[rows, columns]] += 1e3
