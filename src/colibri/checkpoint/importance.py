"""How much each input column of each expert matters: what inputs it met in a text.

A safetensors file of float32 and int64 tensors, for each MoE layer:
`importance.<layer>.rows` `[E]` tokens that chose the expert, `importance.<layer>.input` `[E, D]`
and `importance.<layer>.hidden` `[E, F]` sums of squares of what entered gate and up, and down.
Rounding weighs the squares of its errors by them: `sum_k m_k (w_k - w'_k)^2`, with m the mean
square of the inputs, is the mean squared error of the product where inputs do not correlate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.experts import ExpertIndex
from colibri.checkpoint.safetensors import TensorSpec, read_header, read_tensor
from colibri.checkpoint.safetensors_writer import (
    Pending,
    float_tensor,
    ids_tensor,
    write_safetensors,
)
from colibri.errors import CheckpointError
from colibri.formats import Floats

_PREFIX = "importance"


@dataclass(frozen=True, slots=True, eq=False)
class LayerImportance:
    """One MoE layer.

    Attributes:
        rows: `[E]` tokens that chose each expert.
        input: `[E, D]` sums of squares of the inputs of gate and up.
        hidden: `[E, F]` the same of down.
    """

    rows: NDArray[np.int64]
    input: Floats
    hidden: Floats

    @classmethod
    def empty(cls, num_experts: int, hidden_size: int, intermediate_size: int) -> LayerImportance:
        """Nothing was seen yet."""
        return cls(
            np.zeros(num_experts, np.int64),
            np.zeros((num_experts, hidden_size), np.float32),
            np.zeros((num_experts, intermediate_size), np.float32),
        )

    def of(self, expert: int) -> tuple[Floats | None, Floats | None, Floats | None]:
        """Mean squares of what gate, up and down of an expert met, `[K]`; None where nothing."""
        rows = int(self.rows[expert])
        if not rows:
            return None, None, None
        entered, mixed = (
            sums[expert] / np.float32(rows) if sums[expert].any() else None
            for sums in (self.input, self.hidden)
        )
        return entered, entered, mixed


Importance = Mapping[int, LayerImportance]
"""By the layer's number in the model."""


def write_importance(path: Path, importance: Importance) -> None:
    """Replace a file.

    Raises:
        CheckpointError: it cannot be written.
    """
    tensors: list[Pending] = []
    for number, layer in importance.items():
        stem = f"{_PREFIX}.{number}"
        tensors += [
            ids_tensor(f"{stem}.rows", layer.rows),
            float_tensor(f"{stem}.input", layer.input, "F32"),
            float_tensor(f"{stem}.hidden", layer.hidden, "F32"),
        ]
    try:
        write_safetensors(path, tensors)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None


def read_importance(path: Path, index: ExpertIndex) -> Importance:
    """The file's layers, which must be those of a model's experts.

    Raises:
        CheckpointError: the file is broken, or of a model of other layers or sizes; the message
            names the tensor, wanted and found.
    """
    specs = read_header(path)
    found = {}
    for layout in index.layers:
        gate, _, down = layout.parts
        count, stem = layout.num_experts, f"{_PREFIX}.{layout.layer}"
        found[layout.layer] = LayerImportance(
            _read(path, specs, f"{stem}.rows", "I64", (count,)).view(np.int64),
            _sums(path, specs, f"{stem}.input", (count, gate.columns)),
            _sums(path, specs, f"{stem}.hidden", (count, down.columns)),
        )
    return found


def _sums(path: Path, specs: Mapping[str, TensorSpec], name: str, shape: tuple[int, int]) -> Floats:
    sums = _read(path, specs, name, "F32", shape).view(np.float32).reshape(shape)
    if not (np.isfinite(sums).all() and (sums >= 0).all()):
        raise CheckpointError(
            f"{path}: tensor {name}: wanted sums of squares, found one that is negative or not "
            "finite; make it again with `coli eval importance`"
        )
    return sums


def _read(
    path: Path,
    specs: Mapping[str, TensorSpec],
    name: str,
    dtype: str,
    shape: tuple[int, ...],
) -> NDArray[np.uint8]:
    spec = specs.get(name)
    if spec is None or (spec.dtype, spec.shape) != (dtype, shape):
        said = "nothing" if spec is None else f"{spec.dtype} {list(spec.shape)}"
        raise CheckpointError(
            f"{path}: tensor {name}: wanted {dtype} {list(shape)}, found {said}: is it the "
            "importance of another model? make it with `coli eval importance`"
        )
    return read_tensor(spec)
