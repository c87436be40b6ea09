"""Tensors on disk that hold several of ours: matrices in a stack, or rows that take turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from colibri.checkpoint.safetensors import TensorSpec
from colibri.checkpoint.strict_json import shown
from colibri.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Division:
    """One tensor that is several of ours.

    Attributes:
        theirs: how its name ends.
        ours: how the names of its parts end. One name with `{}` stands for a stack `[n, …]` of
            parts 0, 1, …; several names for parts whose rows take turns.
    """

    theirs: str
    ours: tuple[str, ...]


def divide(
    tensors: Mapping[str, TensorSpec], divisions: Sequence[Division]
) -> dict[str, TensorSpec]:
    """The same tensors with parts in the place of what holds several; rules apply in turn.

    Raises:
        CheckpointError: a tensor does not divide, or one of its parts is there already.
    """
    found = dict(tensors)
    for division in divisions:
        for name in [name for name in found if name.endswith(division.theirs)]:
            spec, stem = found.pop(name), name.removesuffix(division.theirs)
            for ending, part in _parts(spec, division):
                other = found.setdefault(stem + ending, part)
                if other is not part:
                    raise CheckpointError(
                        f"tensors {shown(other.name)} ({other.file.name}) and {shown(spec.name)}"
                        f" ({spec.file.name}) both hold {shown(stem + ending)}; remove one"
                    )
    return found


def _parts(spec: TensorSpec, division: Division) -> Iterator[tuple[str, TensorSpec]]:
    number, stacked = len(division.ours), len(division.ours) == 1
    if len(spec.shape) < 2 or (not stacked and spec.shape[-2] % number):
        raise CheckpointError(
            f"{spec.file}: tensor {shown(spec.name)}: wanted "
            f"{'a stack of matrices' if stacked else f'a multiple of {number} rows'},"
            f" found {list(spec.shape)}"
        )
    if stacked:
        first, *shape = spec.shape
        for i in range(first):
            part = replace(spec, shape=tuple(shape), nbytes=spec.nbytes // first)
            yield division.ours[0].format(i), replace(part, offset=spec.offset + i * part.extent)
        return
    row = spec.row_nbytes
    for place, ending in enumerate(division.ours):
        yield (
            ending,
            replace(
                spec,
                shape=(*spec.shape[:-2], spec.shape[-2] // number, spec.shape[-1]),
                offset=spec.offset + place * (row + spec.skip),
                nbytes=spec.nbytes // number,
                skip=(number - 1) * row + number * spec.skip,
            ),
        )
