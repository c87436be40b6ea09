"""Parameters: what a block needs from a checkpoint, by its Hugging Face name and shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from colibri.formats import Floats
from colibri.kernels.api import Matrix

Kind: TypeAlias = Literal[
    "norm", "centred_norm", "bias", "filter", "ids",
    "matrix", "embedding", "router", "absorbed", "table",
]  # fmt: skip

VECTORS: frozenset[Kind] = frozenset({"norm", "centred_norm", "bias", "filter", "ids"})
ROUNDED: frozenset[Kind] = frozenset({"matrix", "embedding"})  # what coding may round


@dataclass(frozen=True, slots=True)
class Parameter:
    """One dense tensor.

    Attributes:
        name: full name in the checkpoint, after the family's renaming.
        shape: as stored, `[out, in]` for matrices.
        kind: norms, biases, filters of convolutions and tables of ids (`VECTORS`; ids are stored
            as whole numbers below 2^24) are resident as float32,
            matrices as they are stored; routers are never coded by a conversion, nor is an absorbed
            matrix, which is multiplied from both sides and so resident as floats. What is stored of
            a centred norm is `w - 1`. A table stays on disk, whole or in shards (`.shard_0`, …).
        rows_per_token: rows of a table that one token reads.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    rows_per_token: int = 0


class Rows(Protocol):
    """Rows of a matrix, read when they are asked for (`memory.row_table.RowTable`)."""

    def rows(self, numbers: NDArray[np.int64]) -> Floats:
        """Rows `numbers [..]` as float32 `[.., columns]`."""


class Weights(Protocol):
    """Where a block gets its tensors when it is bound.

    Every name asked for was announced as a `Parameter`.
    """

    def vector(self, name: str) -> Floats:
        """A norm, bias, filter or table of ids as float32, flat."""

    def matrix(self, name: str, bias: str | None = None) -> Matrix:
        """A matrix in its resident format, with its bias if one is named."""

    def table(self, name: str) -> Rows:
        """A table that stays on disk."""


def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> list[Parameter]:
    """The parameters of `name.weight [rows, columns]` and, if asked, `name.bias [rows]`."""
    weight = [Parameter(f"{name}.weight", (rows, columns), "matrix")]
    return [*weight, Parameter(f"{name}.bias", (rows,), "bias")] if bias else weight


def bind_linear(weights: Weights, name: str, *, bias: bool = False) -> Matrix:
    """The matrix of `name.weight` with `name.bias` if asked."""
    return weights.matrix(f"{name}.weight", f"{name}.bias" if bias else None)
