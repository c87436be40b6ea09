"""Streams that gates read and write, in C; see native/abi_gated.cdef."""

from __future__ import annotations

import numpy as np

from colibri.formats import Floats
from colibri.kernels.native_calls import NativeCalls


class NativeGated(NativeCalls):
    """`GatedStreamKernels` in C; a part of `NativeKernels`."""

    def read_gated(self, x: Floats, gate: Floats, num_streams: int) -> Floats:
        """See `GatedStreamKernels.read_gated`."""
        rows, width = len(x), _width(x, num_streams)
        out = np.empty((rows, width), np.float32)
        c_x, c_gate = self._floats(x, x.shape, "x"), self._floats(gate, x.shape, "gate")
        self._do("colibri_read_gated", c_x, c_gate, num_streams, width, rows, self._out(out))
        return out

    def write_gated(self, weights: Floats, y: Floats, x: Floats) -> None:
        """See `GatedStreamKernels.write_gated`."""
        rows, num = weights.shape
        width = _width(x, num)
        c_weights = self._floats(weights, (rows, num), "weights")
        c_y, c_x = self._floats(y, (rows, width), "y"), self._floats(x, (rows, num * width), "x")
        self._do("colibri_write_gated", c_weights, c_y, num, width, rows, c_x)

    def match_streams(self, x: Floats, y: Floats, num_streams: int) -> Floats:
        """See `GatedStreamKernels.match_streams`."""
        out = np.empty((len(x), num_streams), np.float32)
        c_x, c_y = self._floats(x, x.shape, "x"), self._floats(y, x.shape, "y")
        width = _width(x, num_streams)
        self._do("colibri_match_streams", c_x, c_y, num_streams, width, len(x), self._out(out))
        return out


def _width(x: Floats, num_streams: int) -> int:
    """Columns of one stream."""
    if x.ndim != 2 or num_streams < 1 or x.shape[1] % num_streams:
        raise ValueError(f"rows {list(x.shape)} do not hold {num_streams} streams")
    return int(x.shape[1]) // num_streams
