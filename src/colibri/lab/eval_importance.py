"""`coli eval importance`: what inputs each expert's columns meet in a text, for `coli convert`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from colibri.checkpoint.importance import Importance, LayerImportance, write_importance
from colibri.errors import UnsupportedModelError
from colibri.formats import Floats
from colibri.kernels.api import Experts, Ints, Kernels, Routing, Slots
from colibri.kernels.reference import expert_bias, expert_part, swiglu
from colibri.lab.envelope import Envelope
from colibri.lab.eval_text import OWN_BYTES, Cut, read_passage
from colibri.lab.routed import sparse_layers
from colibri.llm import LLM
from colibri.llm.loading import LoadProgress, open_model
from colibri.models.model import Model
from colibri.settings import Settings

SCHEMA = "colibri.eval.importance/1"


class Collecting:
    """Kernels that keep the squares of what enters experts, and else are those they stand for.

    What enters down is computed anew, in NumPy: kernels keep it to themselves.
    """

    def __init__(self, kernels: Kernels, model: Model) -> None:
        self._kernels = kernels
        layers = sparse_layers(model)
        self._layer_of = {id(moe.experts): moe.layer for moe in layers}
        self.found: Importance = {
            moe.layer: LayerImportance.empty(
                moe.experts.num_experts,
                moe.experts.gate_proj.columns,
                moe.experts.down_proj.columns,
            )
            for moe in layers
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def moe_step(
        self, layer: Experts, routing: Routing, experts: Ints, slots: Ints, table: Slots, y: Floats
    ) -> None:
        """See `Kernels.moe_step`."""
        self._kernels.moe_step(layer, routing, experts, slots, table, y)
        found = self.found[self._layer_of[id(layer)]]
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            hidden = routing.hidden[(routing.ids == expert).any(axis=1)]
            gate, up = (
                hidden @ expert_part(table, slot, i, part).T
                + expert_bias(table, slot, i, part.rows)
                for i, part in enumerate((layer.gate_proj, layer.up_proj))
            )
            found.rows[expert] += len(hidden)
            found.input[expert] += np.square(hidden).sum(axis=0)
            found.hidden[expert] += np.square(swiglu(gate, up, layer.swiglu)).sum(axis=0)


def eval_importance(
    texts: Sequence[Path], out: Path, cut: Cut, settings: Settings, progress: LoadProgress
) -> Envelope:
    """Read texts and write down what experts met.

    Raises:
        UnsupportedModelError: the model has no routed experts.
        CheckpointError: `out` cannot be written.
        RequestError, TextError: see `read_passage`.
        SettingsError, BudgetError: as opening a model raises them.
    """
    opened = open_model(settings, progress, OWN_BYTES)
    model = opened.model
    with LLM(opened.prepared, model, opened.heat, opened.route_trace) as llm:
        if not sparse_layers(model):
            raise UnsupportedModelError(
                f"{opened.prepared.directory}: no routed experts, so nothing to tell"
            )
        collecting = Collecting(model.kernels, model)
        model.kernels = cast(Kernels, collecting)
        passages = [read_passage(path, llm.prepared, cut) for path in texts]
        for passage in passages:
            stage, done = f"reading {passage.path.name}", 0
            for window in passage.windows:
                progress(stage, done, passage.num_foretold)
                for _ in llm.logits_from(window.ids, len(window.ids) - 1):
                    done += window.num_foretold
            progress(stage, done, passage.num_foretold)
    write_importance(out, collecting.found)
    results = [_row(out, passages, collecting.found)]
    return Envelope(schema=SCHEMA, settings=settings.as_dict(), ceilings={}, results=results)


def _row(out: Path, passages: Sequence[Any], found: Importance) -> dict[str, Any]:
    rows = np.concatenate([layer.rows for layer in found.values()])
    return {
        "file": str(out),
        "texts": [str(passage.path) for passage in passages],
        "tokens": sum(passage.num_ids for passage in passages),
        "experts": len(rows),
        "experts_unseen": int((rows == 0).sum()),
        "fewest_tokens_of_an_expert": int(rows.min()),
        "median_tokens_of_an_expert": float(np.median(rows)),
    }
