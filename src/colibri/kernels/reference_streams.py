"""Residual streams in NumPy; see `kernels.streams`."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Matrix
from colibri.kernels.reference_math import sigmoid, softmax
from colibri.kernels.streams import StreamMix


class ReferenceStreams:
    """`StreamKernels` in NumPy; a part of `ReferenceKernels`."""

    @abstractmethod
    def matmul(self, matrix: Matrix, x: Floats) -> Floats:
        """See `Kernels.matmul`."""

    def read_streams(self, mix: StreamMix, x: Floats) -> tuple[Floats, Floats]:
        """Weights first, then their sum."""
        n, eps = mix.num_streams, np.float32(mix.eps)
        mean = np.square(x).mean(axis=1, keepdims=True, dtype=np.float32)
        found = self.matmul(mix.fn, x) / np.sqrt(mean + np.float32(mix.norm_eps))
        weights = np.empty_like(found)
        weights[:, :n] = sigmoid(found[:, :n] * mix.scale[0] + mix.base[:n]) + eps
        if not mix.reads_only:
            post = found[:, n : 2 * n] * mix.scale[1] + mix.base[n : 2 * n]
            weights[:, n : 2 * n] = 2 * sigmoid(post)
            scores = found[:, 2 * n :] * mix.scale[2] + mix.base[2 * n :]
            found = _mixing(scores.reshape(-1, n, n), mix)
            weights[:, 2 * n :] = found.reshape(scores.shape)
        streams = x.reshape(len(x), n, x.shape[1] // n)
        return np.einsum("tn,tnd->td", weights[:, :n], streams), weights

    def write_streams(self, mix: StreamMix, weights: Floats, y: Floats, x: Floats) -> None:
        """Mix, then add."""
        n = mix.num_streams
        streams, matrix = (
            x.reshape(len(x), n, x.shape[1] // n),
            weights[:, 2 * n :].reshape(-1, n, n),
        )
        mixed = np.einsum("tij,tid->tjd", matrix, streams)
        streams[:] = weights[:, n : 2 * n, None] * y[:, None] + mixed


def _mixing(scores: Floats, mix: StreamMix) -> Floats:
    """`[T, n, n]` whose rows and columns nearly add up to one."""
    eps = np.float32(mix.eps)
    found = softmax(scores) + eps
    found = found / (found.sum(axis=1, keepdims=True) + eps)
    for _ in range(mix.iterations - 1):
        found = found / (found.sum(axis=2, keepdims=True) + eps)
        found = found / (found.sum(axis=1, keepdims=True) + eps)
    return np.asarray(found, np.float32)
