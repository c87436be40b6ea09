"""Streams that gates read and write, in NumPy; see `kernels.gated`."""

from __future__ import annotations

import numpy as np

from colibri.formats import Floats
from colibri.kernels.reference_math import sigmoid


class ReferenceGated:
    """`GatedStreamKernels` in NumPy; a part of `ReferenceKernels`."""

    def read_gated(self, x: Floats, gate: Floats, num_streams: int) -> Floats:
        """The mean of what gates let through."""
        streams = (sigmoid(gate) * x).reshape(len(x), num_streams, x.shape[1] // num_streams)
        return np.asarray(streams.mean(axis=1, dtype=np.float32))

    def write_gated(self, weights: Floats, y: Floats, x: Floats) -> None:
        """Add to all streams."""
        x += (weights[:, :, None] * y[:, None]).reshape(x.shape)

    def match_streams(self, x: Floats, y: Floats, num_streams: int) -> Floats:
        """Sums of products."""
        products = (x * y).reshape(len(x), num_streams, x.shape[1] // num_streams)
        return np.asarray(products.sum(axis=2, dtype=np.float32))
