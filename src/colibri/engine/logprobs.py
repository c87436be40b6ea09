"""Log probabilities of the model's own distribution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri.engine.messages import Logprobs


def logprobs_of(logits: NDArray[np.float32], token: int, top: int) -> Logprobs:
    """Of `token` and of the `top` likeliest ids, after `logits [V]`, in float64."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return Logprobs(float(values[token]), _likeliest(values, top))


def _likeliest(values: NDArray[np.float64], top: int) -> tuple[tuple[int, float], ...]:
    if not top:
        return ()
    least = np.partition(values, -top)[-top] if top < len(values) else values.min()
    candidates = np.flatnonzero(values >= least)
    order = candidates[np.argsort(-values[candidates], kind="stable")][:top]
    return tuple((int(token), float(values[token])) for token in order)
