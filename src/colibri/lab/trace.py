"""Which experts a model chose: read from `--route-trace` files, and put in order for replay."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri.errors import RequestError
from colibri.formats import Floats
from colibri.kernels.api import Ints
from colibri.llm.route_trace import FORMAT
from colibri.memory.eviction import Keys

Steps = Literal["token", "pass"]
_COLUMNS = ("passes", "positions", "tokens", "rows", "ids", "weights")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trace:
    """Routing of n (token, layer) pairs, in the order in which they were computed.

    Attributes:
        num_layers: MoE layers L.
        num_experts: experts E of each.
        record_bytes: bytes of one expert, or 0 where the trace does not say.
        passes: `[n]` number of the pass through the model; a chunk of a prompt is one pass.
        positions: `[n]` position of the token in its sequence.
        tokens: `[n]` its id.
        rows: `[n]` number of the MoE layer, from 0.
        ids: `[n, A]` chosen experts.
        weights: `[n, A]` their weights.
    """

    num_layers: int
    num_experts: int
    record_bytes: int
    passes: Ints
    positions: Ints
    tokens: Ints
    rows: Ints
    ids: Ints
    weights: Floats

    @property
    def active(self) -> int:
        """Experts chosen for a token in a layer, A."""
        return int(self.ids.shape[1])

    @property
    def num_keys(self) -> int:
        """L times E."""
        return self.num_layers * self.num_experts

    def leases(self, steps: Steps = "token") -> list[Keys]:
        """Keys, ascending, of what is needed at once: by a token in a layer, or by a whole pass."""
        keys = self.rows[:, None].astype(np.int64) * self.num_experts + self.ids
        if steps == "token":
            order = np.lexsort((self.rows, self.positions, self.passes))
            return list(np.sort(keys[order], axis=1))
        order = np.lexsort((self.rows, self.passes))
        passes, rows = self.passes[order], self.rows[order]
        ends = np.flatnonzero((np.diff(passes) != 0) | (np.diff(rows) != 0)) + 1
        return [np.unique(part) for part in np.split(keys[order], ends)]


def read_trace(path: Path) -> Trace:
    """Read a file that `--route-trace` wrote; see `llm.route_trace` for its lines.

    Raises:
        RequestError: the file cannot be read, or a line is not as it should be; names the line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return _read(path, file)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}: name a file of --route-trace") from None
    except UnicodeDecodeError:
        raise RequestError(_no_trace(path)) from None


def _read(path: Path, lines: Iterator[str]) -> Trace:
    head = _head(path, next(lines, ""))
    try:
        layers = [int(layer) for layer in head["layers"]]
        sizes = int(head["num_experts"]), int(head["num_experts_per_tok"])
        record_bytes = int(head.get("record_bytes", 0))
    except (KeyError, TypeError, ValueError):
        raise RequestError(
            f"{path}: line 1 lacks layers, num_experts or num_experts_per_tok: make the trace anew"
        ) from None
    position = {layer: row for row, layer in enumerate(layers)}
    rows = [
        _row(path, number, _parsed(path, number, line), position, sizes)
        for number, line in enumerate(lines, 2)
    ]
    if not rows:
        raise RequestError(f"{path}: it holds no tokens: generate some with --route-trace")
    numbers = np.array([row[:4] for row in rows], np.int32)
    return Trace(
        num_layers=len(layers),
        num_experts=sizes[0],
        record_bytes=record_bytes,
        passes=numbers[:, 0],
        positions=numbers[:, 1],
        tokens=numbers[:, 2],
        rows=numbers[:, 3],
        ids=np.array([row[4] for row in rows], np.int32),
        weights=np.array([row[5] for row in rows], np.float32),
    )


def _head(path: Path, line: str) -> dict[str, Any]:
    """The first line, which says what the others are."""
    try:
        head = json.loads(line)
    except ValueError:
        head = None
    if not isinstance(head, dict) or "route_trace" not in head:
        raise RequestError(_no_trace(path))
    if head["route_trace"] != FORMAT:
        raise RequestError(
            f"{path}: is a route trace of another form than this release writes: make it anew"
        )
    return head


def _no_trace(path: Path) -> str:
    return f"{path}: is no route trace (written by --route-trace): name one"


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise RequestError(
            f"{path}: line {number} is no JSON: the file is damaged or cut short; make it anew"
        ) from None


def _row(
    path: Path, number: int, line: Any, position: dict[int, int], sizes: tuple[int, int]
) -> tuple[int, int, int, int, list[int], list[float]]:
    """Pass, position, token, row, ids and weights of one line."""
    try:
        step, place, token, layer, ids, weights = line
        row = position[layer]
        good = len(set(ids)) == len(ids) == len(weights) == sizes[1]
        good = good and all(0 <= expert < sizes[0] for expert in ids)
    except (TypeError, ValueError, KeyError):
        good = False
    if not good:
        raise RequestError(
            f"{path}: line {number}: wanted [pass, position, token, layer, [{sizes[1]} experts "
            f"below {sizes[0]}], [their weights]] of layers {list(position)}; make the trace anew"
        )
    return step, place, token, row, ids, weights


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace out of several of one model, one after the other.

    Raises:
        RequestError: there is none, or they are of models of different shapes.
    """
    if not traces:
        raise RequestError("there is no trace: name files of --route-trace")
    shapes = {(t.num_layers, t.num_experts, t.active, t.record_bytes) for t in traces}
    if len(shapes) != 1:
        raise RequestError(
            "the traces are of different models (layers, experts, active experts, bytes): "
            f"{sorted(shapes)}; give those of one model"
        )
    passes, start = [], 0
    for trace in traces:
        passes.append(trace.passes - trace.passes.min() + start)
        start = int(passes[-1].max()) + 1
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(trace, name) for trace in traces]) for name in _COLUMNS[1:]
    }
    return replace(traces[0], passes=np.concatenate(passes), **columns)


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """First and second half of a trace, cut between two tokens."""
    order = np.lexsort((trace.rows, trace.positions, trace.passes))
    starts = np.flatnonzero(trace.rows[order] == trace.rows[order[0]])
    cut = int(starts[(len(starts) + 1) // 2]) if len(starts) > 1 else len(order)
    return _part(trace, order[:cut]), _part(trace, order[cut:])


def _part(trace: Trace, chosen: NDArray[np.intp]) -> Trace:
    columns: dict[str, Any] = {name: getattr(trace, name)[chosen] for name in _COLUMNS}
    return replace(trace, **columns)
