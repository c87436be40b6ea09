"""Kernels whose calls are written down as spans, waits for records within them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Experts, Ints, Kernels, Routing, Slots
from colibri.kernels.native import NativeKernels
from colibri.spans import Spans, now_ns

_MOST_WAITS = 256  # of one call
_SIZES = ("workspace_nbytes", "reserve")
OPERATIONS = tuple(
    name
    for name in dir(Kernels)
    if not name.startswith("_") and name not in _SIZES and callable(getattr(Kernels, name))
)


def traced_kernels(kernels: Kernels, spans: Spans) -> Kernels:
    """The same operations, each call of which is a span."""
    return cast(Kernels, _TracedKernels(kernels, spans))


class _TracedKernels:
    def __init__(self, kernels: Kernels, spans: Spans) -> None:
        self._kernels, self._spans = kernels, spans
        for name in OPERATIONS:
            if name != "moe_step":
                setattr(self, name, spans.timed(getattr(kernels, name), name, "kernel"))
        if isinstance(kernels, NativeKernels):
            kernels.waits = np.zeros((_MOST_WAITS, 2), np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def moe_step(
        self, layer: Experts, routing: Routing, experts: Ints, slots: Ints, table: Slots, y: Floats
    ) -> None:
        """A span that holds those of its waits."""
        begin = now_ns()
        try:
            self._kernels.moe_step(layer, routing, experts, slots, table, y)
        finally:
            end = now_ns()
            if isinstance(self._kernels, NativeKernels) and self._kernels.waits is not None:
                for first, last in self._kernels.waits[: self._kernels.num_waits].tolist():
                    self._spans.add("wait", "wait", first, last)
            told = {"rows": len(y), "experts": len(experts)}
            self._spans.add("moe_step", "kernel", begin, end, **told)
