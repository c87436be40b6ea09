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
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from colibri.engine.forward import ForwardModel, Leaving, Routes
from colibri.errors import SettingsError
from colibri.kernels.api import Batch, Routing

FORMAT = 1
# Layer, experts `[T, A]`, their weights `[T, A]`.
Chosen: TypeAlias = tuple[int, NDArray[np.int32], NDArray[np.float32]]


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

    def add(self, ids: NDArray[np.int32], batch: Batch, routes: list[Chosen]) -> None:
        """Write a pass over `ids [T]`."""
        rows = list(zip(batch.positions.tolist(), ids.tolist(), strict=True))
        lines = []
        for layer, chosen, given in routes:
            weights = np.round(given.astype(np.float64), 5).tolist()
            for (position, token), experts, shares in zip(
                rows, chosen.tolist(), weights, strict=True
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
        leaving: Leaving | None = None,
        routes: Routes | None = None,
    ) -> NDArray[np.float32]:
        """As `ForwardModel.forward`; members that leave leave no lines."""
        there = np.ones(len(ids), np.bool_)  # [T] rows whose member has not left
        seen: list[tuple[int, Routing, NDArray[np.bool_]]] = []

        def departing() -> Sequence[int]:
            left = () if leaving is None else leaving()
            there[np.isin(batch.members, left)] = False
            return left

        def keep(layer: int, routing: Routing) -> None:
            seen.append((layer, routing, there.copy()))
            if routes is not None:
                routes(layer, routing)

        logits = self._model.forward(ids, batch, wanted, leaving=departing, routes=keep)
        stayed = [(layer, r.ids[there[was]], r.weights[there[was]]) for layer, r, was in seen]
        self._trace.add(ids[there], batch.narrowed(there), stayed)
        return logits
