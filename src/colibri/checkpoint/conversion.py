"""What a conversion is going to do, before a byte is written: formats, sizes, and of which files.

Which tensors are experts and which are dense is known to families, above this layer; here both come
ready indexed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from colibri.checkpoint.coding import require_exact
from colibri.checkpoint.experts import ExpertIndex, ExpertLayerLayout
from colibri.checkpoint.hub.names import title
from colibri.checkpoint.importance import Importance, read_importance
from colibri.checkpoint.index import Checkpoint
from colibri.checkpoint.recode import DenseParameter
from colibri.checkpoint.record import RecordLayout
from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.formats import Format, IntegerFormat

_COMPANIONS = (
    *("tokenizer*", "chat_template*", "generation_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
    *("LICENSE*", "NOTICE*"),
)
KEPT = "as stored"
HEADS = "drafting heads"


@dataclass(frozen=True, slots=True)
class ExpertFormats:
    """The formats that routed experts get; None keeps theirs.

    Attributes:
        experts: of all parts, unless `down` says otherwise.
        down: of down_proj, where it should be another; rounding costs most there.
        mtp: of all parts in drafting heads.
        first_head: number of the first layer that is of a drafting head.
    """

    experts: Format | None
    down: Format | None = None
    mtp: Format | None = None
    first_head: int | None = None

    def of(self, layer: int) -> tuple[Format | None, Format | None, Format | None]:
        """Of gate, up and down."""
        if self.first_head is not None and layer >= self.first_head:
            return (self.mtp, self.mtp, self.mtp)
        return (self.experts, self.experts, self.down or self.experts)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the container for people: its formats and bytes, before and after."""

    name: str
    source_formats: tuple[str, ...]
    formats: tuple[str, ...]
    source_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """A checkpoint, and what it is to become.

    Attributes:
        checkpoint: what is converted.
        index: its routed experts.
        layouts: how those of each layer are laid out in the container.
        dense: everything else.
        family: the model_type of the configuration.
        about: source and formats, as the container will name them.
        first_head: number of the first layer that is of a drafting head.
        left_aside: tensors that are not converted, counted by part.
        importance: what weighs the rounding of experts, where it is known.
    """

    checkpoint: Checkpoint
    index: ExpertIndex
    layouts: tuple[RecordLayout, ...]
    dense: tuple[DenseParameter, ...]
    family: str
    about: Mapping[str, str]
    first_head: int | None = None
    left_aside: Mapping[str, int] = field(default_factory=dict)
    importance: Importance = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        index: ExpertIndex,
        dense: Sequence[DenseParameter],
        *,
        family: str,
        formats: ExpertFormats,
        left_aside: Mapping[str, int] | None = None,
    ) -> Conversion:
        """Lay out what `formats` ask for.

        Raises:
            UnsupportedModelError: experts or dense tensors are coded in another format than they
                get, and that is not f32.
        """
        for parameter in dense:  # they are written last, hours later perhaps
            require_exact(parameter.stored, parameter.format, parameter.name)
        layouts = tuple(_target(layer, formats) for layer in index.layers)
        about = {
            "name": title(checkpoint.place),
            "experts": formats.experts.name if formats.experts else KEPT,
            **({} if formats.down is None else {"down": formats.down.name}),
            "dense": ", ".join(sorted({parameter.format.name for parameter in dense})),
        }
        head = {each.format.name for each in dense if each.part == "head" and each.is_changed}
        if head:
            about["head"] = head.pop()
        if formats.first_head is not None:
            about["mtp"] = formats.mtp.name if formats.mtp else KEPT
        aside = left_aside or {}
        first = formats.first_head
        return cls(checkpoint, index, layouts, tuple(dense), family, about, first, aside)

    def weighed(self, path: Path) -> Conversion:
        """The same, scales of experts being chosen by the importance in a file.

        Drafting heads are not part of what `coli eval` runs: theirs are chosen without.

        Raises:
            CheckpointError: the file is broken or of another model.
            UnsupportedModelError: no expert is rounded to integers with scales.
        """
        pairs = zip(self.index.layers, self.layouts, strict=True)
        if not any(
            isinstance(new.format, IntegerFormat) and old.format is not new.format
            for layer, layout in pairs
            for old, new in zip(layer.parts, layout.parts, strict=True)
        ):
            raise UnsupportedModelError(
                f"{path}: no expert of {self.checkpoint.place} is rounded to integers with "
                "scales, so their importance changes nothing: leave it out, or name such a format"
            )
        told = tuple(layer for layer in self.index.layers if not self._is_head(layer.layer))
        found = read_importance(path, replace(self.index, layers=told))
        digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        return replace(self, importance=found, about={**self.about, "importance": digest})

    @property
    def files(self) -> list[Path]:
        """The files of the source that hold its tensors."""
        files = {spec.file for spec in self.checkpoint.tensors.values()}
        if (container := self.checkpoint.container) is not None:
            files |= {self.checkpoint.directory / name for name in container.manifest.files}
        return sorted(files)

    @property
    def source_bytes(self) -> int:
        """Bytes of these files."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def total_bytes(self) -> int:
        """Bytes that are to be written, without headers."""
        return self._records_nbytes(self.layouts) + sum(each.nbytes for each in self.dense)

    def _records_nbytes(self, layouts: Sequence[RecordLayout]) -> int:
        pairs = zip(self.index.layers, layouts, strict=True)
        return sum(layer.num_experts * layout.nbytes for layer, layout in pairs)

    @property
    def num_weights(self) -> int:
        """Weights that change their format."""
        pairs = zip(self.index.layers, self.layouts, strict=True)
        experts = sum(
            layer.num_experts * old.rows * old.columns
            for layer, layout in pairs
            for old, new in zip(layer.parts, layout.parts, strict=True)
            if old.format is not new.format
        )
        changed = (each for each in self.dense if each.is_changed)
        return experts + sum(each.extents[0] * each.extents[1] for each in changed)

    def parts(self) -> list[Part]:
        """Experts, dense part, head, tables and drafting heads, as far as there are any."""
        found: dict[str, list[_Entry]] = {}
        for layer, layout in zip(self.index.layers, self.layouts, strict=True):
            before, after = (
                ", ".join(dict.fromkeys(part.format.name for part in of.parts))
                for of in (layer, layout)
            )
            sizes = (layer.num_experts * layer.record_nbytes, layer.num_experts * layout.nbytes)
            name = HEADS if self._is_head(layer.layer) else "experts"
            found.setdefault(name, []).append(_Entry(before, after, *sizes))
        for each in self.dense:
            stored = each.stored.resident_nbytes(each.extents)
            entry = _Entry(each.stored.name, each.format.name, stored, each.nbytes)
            found.setdefault(each.part, []).append(entry)
        return [_part(name, entries) for name, entries in found.items()]

    def _is_head(self, layer: int) -> bool:
        return self.first_head is not None and layer >= self.first_head

    def fingerprint(self) -> str:
        """Names, sizes and times of the files that are read: whether a source is still the same.

        Raises:
            CheckpointError: one of them is gone.
        """
        config = sorted(self.checkpoint.config.items(), key=str)
        digest = hashlib.sha256(repr(config).encode())
        for path in self.files:
            try:
                status = path.stat()
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        for each in self.dense:
            digest.update(f"{each.name} {each.format.name}\n".encode())
        return digest.hexdigest()


class _Entry(NamedTuple):
    """A tensor, or a layer of experts: formats and bytes, before and after."""

    before: str
    after: str
    source_bytes: int
    total_bytes: int


def _part(name: str, entries: Sequence[_Entry]) -> Part:
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for entry in entries:
        before[entry.before] += entry.source_bytes
        after[entry.after] += entry.total_bytes
    old, new = (tuple(fmt for fmt, _ in sizes.most_common()) for sizes in (before, after))
    return Part(name, old, new, before.total(), after.total())


def _target(layer: ExpertLayerLayout, formats: ExpertFormats) -> RecordLayout:
    """How a layer is laid out in the container."""
    wanted = zip(layer.parts, formats.of(layer.layer), strict=True)
    gate, up, last = (fmt or part.format for part, fmt in wanted)
    for part, fmt in zip(layer.parts, (gate, up, last), strict=True):
        require_exact(part.format, fmt, f"layer {layer.layer}: {part.name}")
    shapes = [(part.rows, part.columns) for part in layer.parts]
    biased = layer.biases is not None
    return RecordLayout.of((gate, up, last), (shapes[0], shapes[1], shapes[2]), biased=biased)


def require_apart(source: Path, destination: Path) -> None:
    """Refuse to write where the source is, before anything advises to remove what is there.

    Raises:
        CheckpointError: one is the other, or inside it.
    """
    old, new = source.resolve(), destination.resolve()
    name_another = "name a directory apart from it for the container"
    if old == new:
        raise CheckpointError(
            f"{destination}: source and destination are the same directory: {name_another}"
        )
    if old in new.parents:
        raise CheckpointError(f"{destination}: is inside the source {source}: {name_another}")
    if new in old.parents:
        raise CheckpointError(f"{destination}: holds the source {source}: {name_another}")


def companions(directory: Path) -> list[Path]:
    """The files that belong to a model beside its weights and config.json."""
    found = {path for pattern in _COMPANIONS for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file())
