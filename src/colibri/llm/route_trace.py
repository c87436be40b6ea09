"""Which experts were chosen, token by token, written while a model runs.

The file is JSON, one value a line. The first line is an object: `route_trace` (the version of this
format), `model`, `layers` (numbers of the MoE layers), `num_experts`, `num_experts_per_tok` and
`record_bytes` (of the largest expert). Every other line is an array of one token in one layer:

    [pass, position, token id, layer, [expert ids by descending weight], [their weights]]

A pass is one run through the layers: a chunk of a prompt, or one new token. Lines are written when
their pass has ended; one that was cancelled or failed leaves none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from colibri.engine.forward import Cancelled, ForwardModel, Routes
from colibri.errors import SettingsError
from colibri.kernels.api import Batch, Routing

FORMAT = 1


class RouteTrace:
    """Appends the passes of one model to a file."""

    def __init__(
        self, path: Path, model: str, layers: list[int], sizes: tuple[int, int], record_bytes: int
    ) -> None:
        """Begin the file anew; `sizes` are experts and active experts of a layer.

        Raises:
            SettingsError: it cannot be written.
        """
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise SettingsError(
                f"route_trace is {path}: {error.strerror}: name a file that can be written"
            ) from None
        self._passes = 0
        head = {
            "route_trace": FORMAT,
            "model": model,
            "layers": layers,
            "num_experts": sizes[0],
            "num_experts_per_tok": sizes[1],
            "record_bytes": record_bytes,
        }
        self._file.write(json.dumps(head) + "\n")

    def add(self, ids: NDArray[np.int32], batch: Batch, routes: list[tuple[int, Routing]]) -> None:
        """Write a pass over `ids [T]`."""
        rows = list(zip(batch.positions.tolist(), ids.tolist(), strict=True))
        lines = []
        for layer, routing in routes:
            weights = np.round(routing.weights.astype(np.float64), 5).tolist()
            for (position, token), experts, shares in zip(
                rows, routing.ids.tolist(), weights, strict=True
            ):
                line = [self._passes, position, token, layer, experts, shares]
                lines.append(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.writelines(lines)
        self._passes += 1

    def close(self) -> None:
        """Write what is left; closing twice is fine."""
        self._file.close()


class TracedModel:
    """A model whose routing is written down; otherwise it is the model."""

    def __init__(self, model: ForwardModel, trace: RouteTrace) -> None:
        self._model, self._trace = model, trace

    def forward(
        self,
        ids: NDArray[np.int32],
        batch: Batch,
        wanted: NDArray[np.int32],
        *,
        cancelled: Cancelled | None = None,
        routes: Routes | None = None,
    ) -> NDArray[np.float32]:
        """As `ForwardModel.forward`."""
        seen: list[tuple[int, Routing]] = []

        def keep(layer: int, routing: Routing) -> None:
            seen.append((layer, routing))
            if routes is not None:
                routes(layer, routing)

        logits = self._model.forward(ids, batch, wanted, cancelled=cancelled, routes=keep)
        self._trace.add(ids, batch, seen)
        return logits
