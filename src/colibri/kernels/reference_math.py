"""The functions that reference kernels share, in NumPy."""

from __future__ import annotations

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Norm


def rms_norm(x: Floats, norm: Norm) -> Floats:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""
    mean = np.square(x).mean(axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(norm.eps)) * norm.weight)


def sigmoid(x: Floats) -> Floats:
    """`1 / (1 + exp(-x))`, without overflow for large negative x."""
    half = np.exp(-np.abs(x))
    out: Floats = np.where(x >= 0, 1, half) / (1 + half)
    return out


def silu(x: Floats) -> Floats:
    """`x * sigmoid(x)`."""
    return x * sigmoid(x)


def softplus(x: Floats) -> Floats:
    """`ln(1 + exp(x))`, without overflow for large x."""
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def softmax(x: Floats) -> Floats:
    """Over the last axis, maximum subtracted."""
    raised = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Floats = raised / raised.sum(axis=-1, keepdims=True)
    return out
