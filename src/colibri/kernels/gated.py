"""Streams that gates read and write: n of them side by side in a row, each gate of that row.

Operands are dense float32 rows; `x [T, n D]` is a row with all streams.
"""

from __future__ import annotations

from typing import Protocol

from colibri.formats import Floats


class GatedStreamKernels(Protocol):
    """Elementwise work on streams, part of `Kernels`."""

    def read_gated(self, x: Floats, gate: Floats, num_streams: int) -> Floats:
        """`sum_i sigmoid(gate_i) x_i / n`, `[T, D]`, of `x, gate [T, n D]`."""

    def write_gated(self, weights: Floats, y: Floats, x: Floats) -> None:
        """`x_i += weights_i y` in place, of `weights [T, n]`, `y [T, D]` and `x [T, n D]`."""

    def match_streams(self, x: Floats, y: Floats, num_streams: int) -> Floats:
        """`x_i . y_i` of each stream, `[T, n]`, of `x, y [T, n D]`."""
