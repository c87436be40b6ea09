"""One measured figure, and several of them as one cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri.lab.bootstrap import Interval, geometric_mean, interval, median, product_interval

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A figure of `coli bench kernels`; None where something does not apply.

    Attributes:
        op: matrix, moe_step, attention or latent (attention).
        shape: whose shape it is; None for a cell, the geometric mean over all shapes.
        format: of weights, or of keys and values.
        activations: how inputs are coded.
        n: rows of the input.
        rows: N of a matrix, F of an expert, positions of attention; None for a cell.
        columns: K of a matrix, D of an expert, K and V values of a position.
        threads: that compute.
        bytes_per_s: weights (or keys and values) read.
        share_of_limit: of what the same threads read without computing, in the same rounds.
        share_of_parts: time of the matrices one by one over time of the whole step.
        gops: 10^9 multiplications and additions per second.
        error_rms: of the output, over its exact rms; the worst of the four kinds of inputs.
        interval: 90 % bootstrap interval of share_of_parts where there is one, else of
            share_of_limit.
        peer_ratio: time of the peer over time of ours.
        peer_interval: the same interval of peer_ratio.
    """

    op: str
    shape: str | None
    format: str
    activations: str
    n: int
    rows: int | None
    columns: int | None
    threads: int
    bytes_per_s: float | None = None
    share_of_limit: float | None = None
    share_of_parts: float | None = None
    gops: float | None = None
    error_rms: float | None = None
    interval: Interval | None = None
    peer_ratio: float | None = None
    peer_interval: Interval | None = None

    @property
    def cell(self) -> tuple[str, str, str, int]:
        """What it has in common with other shapes of its cell."""
        return self.op, self.format, self.activations, self.n

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it, in the order above."""
        return asdict(self)


def no_rounds() -> NDArray[np.float64]:
    """What there is where nothing was timed."""
    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A result and the rounds that it is the median of.

    Attributes:
        result: the medians.
        limits: bytes per second of plain reading, of each round.
        judged: share_of_parts or share_of_limit of each round; empty where only an error was
            measured, as are the others then.
        peer: peer_ratio of each round; empty without a peer.
    """

    result: Result
    limits: NDArray[np.float64] = field(default_factory=no_rounds)
    judged: NDArray[np.float64] = field(default_factory=no_rounds)
    peer: NDArray[np.float64] = field(default_factory=no_rounds)


def peer_fields(ratios: NDArray[np.float64]) -> dict[str, Any]:
    """`peer_ratio` and its interval from the ratios of the rounds, if there are any."""
    if not ratios.size:
        return {}
    return {"peer_ratio": median(ratios.tolist()), "peer_interval": interval(ratios.tolist())}


def with_cells(measured: Sequence[Measured]) -> Iterator[Result]:
    """All results; those that differ in shape alone are followed by their cell."""
    groups: dict[tuple[str, str, str, int], list[Measured]] = {}
    for item in measured:
        groups.setdefault(item.result.cell, []).append(item)
    for members in groups.values():
        yield from (item.result for item in members)
        if len(members) > 1:
            yield _cell(members)


_AVERAGED = ("bytes_per_s", "share_of_limit", "share_of_parts", "gops", "peer_ratio")


def _cell(members: Sequence[Measured]) -> Result:
    first = members[0].result
    values = {item.name: getattr(first, item.name) for item in fields(Result)}
    for name in _AVERAGED:
        values[name] = _mean(getattr(item.result, name) for item in members)
    errors = [m.result.error_rms for m in members if m.result.error_rms is not None]
    judged = [m.judged.tolist() for m in members if m.judged.size]
    peers = [m.peer.tolist() for m in members if m.peer.size]
    values |= {
        "shape": None,
        "rows": None,
        "columns": None,
        "error_rms": max(errors, default=None),
        "interval": product_interval(judged) if judged else None,
        "peer_interval": product_interval(peers) if peers else None,
    }
    return Result(**values)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return geometric_mean(known) if known else None
