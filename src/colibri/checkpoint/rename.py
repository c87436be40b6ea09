"""From the names in the files to the names a family uses, and the book of what has been taken."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from colibri.checkpoint.safetensors import TensorSpec
from colibri.checkpoint.strict_json import shown
from colibri.errors import CheckpointError, IncompleteModelError

_LISTED = 10


class Renaming:
    """Rules that turn a name on disk into a canonical one.

    Every rule is applied in turn, each to what the one before left: `re.sub` of all its matches.
    Anchor what must stand at the start with `^`.
    """

    def __init__(self, rules: Sequence[tuple[str, str]]) -> None:
        """`rules` are pairs of regular expression and replacement, as `re.sub` takes them."""
        self._rules = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def name(self, name: str) -> str:
        """The canonical name of one tensor."""
        for pattern, replacement in self._rules:
            name = pattern.sub(replacement, name)
        return name

    def apply(self, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The same tensors by canonical name.

        Raises:
            CheckpointError: two tensors get one name.
        """
        renamed: dict[str, TensorSpec] = {}
        for name, spec in tensors.items():
            canonical = self.name(name)
            if (other := renamed.setdefault(canonical, spec)) is not spec:
                raise CheckpointError(
                    f"tensors {shown(other.name)} ({other.file.name}) and {shown(name)}"
                    f" ({spec.file.name}) both mean {shown(canonical)}; remove one"
                )
        return renamed


class Census:
    """All tensors of a checkpoint by canonical name; each is taken once, or knowingly ignored."""

    def __init__(self, tensors: Mapping[str, TensorSpec]) -> None:
        """`tensors` are those of the whole checkpoint, renamed."""
        self._tensors = tensors
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def get(self, name: str) -> TensorSpec | None:
        """Look at a tensor without taking it; None where there is none."""
        return self._tensors.get(name)

    def take(self, name: str, shape: tuple[int, ...]) -> TensorSpec:
        """The tensor of that name, which must have that shape and not have been taken before.

        Raises:
            IncompleteModelError: there is none; says how many tensors there are, and how many near
                it.
            CheckpointError: it has another shape, or two parts of the model claim it.
        """
        spec = self._tensors.get(name)
        if spec is None:
            raise IncompleteModelError(self._missing(name, shape))
        if spec.shape != shape:
            raise CheckpointError(
                f"{spec.file}: tensor {shown(spec.name)}: wanted shape {list(shape)},"
                f" found {list(spec.shape)}"
            )
        if name in self._taken:
            raise CheckpointError(f"{spec.file}: tensor {shown(spec.name)} is wanted twice")
        self._taken.add(name)
        return spec

    def count(self, prefix: str) -> int:
        """How many tensors have names under `prefix`."""
        return sum(name.startswith(prefix) for name in self._tensors)

    def finish(self, ignore: Sequence[str]) -> tuple[str, ...]:
        """Hold what is left against `ignore`, patterns that match from the start of a name.

        Returns:
            The names that `ignore` covers, sorted.

        Raises:
            CheckpointError: tensors that nobody takes: some part of the model would be left out.
        """
        patterns = [re.compile(pattern) for pattern in ignore]
        rest = self._tensors.keys() - self._taken
        ignored = {name for name in rest if any(pattern.match(name) for pattern in patterns)}
        left = sorted(rest - ignored)
        if left:
            listed = ", ".join(self._place(name) for name in left[:_LISTED])
            more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
            raise CheckpointError(
                f"{len(left)} of {len(self._tensors)} tensors have no place in this model:"
                f" {listed}{more}; is config.json the one of these weights?"
            )
        return tuple(sorted(ignored))

    def _place(self, name: str) -> str:
        spec = self._tensors[name]
        return f"{shown(spec.name)} {list(spec.shape)} ({spec.file.name})"

    def _missing(self, name: str, shape: tuple[int, ...]) -> str:
        near = _layer_prefix(name)
        around = f", {self.count(near)} of them under {shown(near)}" if near else ""
        return (
            f"tensor {shown(name)} {list(shape)} is missing: wanted 1, found 0 among the"
            f" {len(self._tensors)} of this checkpoint{around}; fetch the checkpoint again"
        )


def _layer_prefix(name: str) -> str:
    """`model.layers.3.mlp.gate.weight` -> `model.layers.3.`; "" where no part is a number."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else ""
