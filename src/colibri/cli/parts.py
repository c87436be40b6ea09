"""A model by parts: formats, parameters and bytes, and what a token reads of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from colibri.checkpoint.conversion import HEADS
from colibri.checkpoint.experts import ExpertLayerLayout
from colibri.checkpoint.index import Checkpoint
from colibri.checkpoint.safetensors import read_header
from colibri.errors import CheckpointError
from colibri.models.blueprint import HEAD_STEM
from colibri.models.description import DenseTensor, Description, TableTensor
from colibri.nn.trunk import EMBEDDING, LM_HEAD

_SHARED = ".shared_expert"
ROUTED, TABLES = "routed experts", "tables"


@dataclass(slots=True)
class Share:
    """One part.

    Attributes:
        part: its name.
        formats: bytes by format, as stored.
        num_parameters: of it.
        num_active_parameters: that a token is multiplied by, or looks up.
        bytes: as stored.
        bytes_per_token: of those that a token reads.
    """

    part: str
    formats: Counter[str] = field(default_factory=Counter)
    num_parameters: int = 0
    num_active_parameters: int = 0
    bytes: int = 0
    bytes_per_token: int = 0

    def add(self, fmt: str, count: int, nbytes: int, active: float = 1.0) -> None:
        """Take in parameters of which a token reads the share `active`."""
        self.formats[fmt] += nbytes
        self.num_parameters += count
        self.bytes += nbytes
        self.num_active_parameters += round(count * active)
        self.bytes_per_token += round(nbytes * active)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`; formats with the largest first."""
        return {**asdict(self), "formats": [fmt for fmt, _ in self.formats.most_common()]}


def parts_of(description: Description) -> list[dict[str, Any]]:
    """Embedding, dense part, shared and routed experts, head, tables and drafting heads."""
    shares: dict[str, Share] = {}
    for part, fmt, count, nbytes, active in _entries(description):
        shares.setdefault(part, Share(part)).add(fmt, count, nbytes, active)
    return [share.as_dict() for share in shares.values()]


def with_heads(checkpoint: Checkpoint) -> Description:
    """The checkpoint with its drafting heads, where it has any that are known."""
    plain = Description.of(checkpoint)
    if HEADS not in plain.left_aside or not plain.blueprint.family.mtp:
        return plain
    try:
        return Description.of(checkpoint, mtp=True)
    except CheckpointError:  # the model runs without them
        return plain


def _entries(description: Description) -> Iterator[tuple[str, str, int, int, float]]:
    tied = description.blueprint.trunk.tied
    for tensor in description.dense:
        nbytes = tensor.stored.resident_nbytes(tensor.shape)
        rows = tensor.parameter.shape[0]
        looked_up = tensor.parameter.name == EMBEDDING and not tied
        active = 1 / rows if looked_up else 0.0 if _is_heads(tensor) else 1.0
        count = math.prod(tensor.parameter.shape)
        yield _part_of(tensor), tensor.stored.name, count, nbytes, active
    yield from _routed(description)
    for table in description.tables:
        yield TABLES, *_table(table)


def _routed(description: Description) -> Iterator[tuple[str, str, int, int, float]]:
    chosen = {
        number: moe.num_experts_per_tok for number, moe in description.blueprint.sparse_layers()
    }
    for layer in description.experts.layers:
        each = sum(part.rows * part.columns for part in layer.parts)
        active = chosen.get(layer.layer, 0) / max(layer.num_experts, 1)
        part = ROUTED if layer.layer in chosen else HEADS
        nbytes = layer.num_experts * layer.record_nbytes
        yield part, _formats(layer), layer.num_experts * each, nbytes, active


def _formats(layer: ExpertLayerLayout) -> str:
    return ", ".join(dict.fromkeys(part.format.name for part in layer.parts))


def _table(table: TableTensor) -> tuple[str, int, int, float]:
    rows = table.parameter.shape[0]
    active = table.parameter.rows_per_token / max(rows, 1)
    return table.stored.name, math.prod(table.parameter.shape), table.nbytes, active


def _is_heads(tensor: DenseTensor) -> bool:
    return tensor.parameter.name.startswith(HEAD_STEM)


def _part_of(tensor: DenseTensor) -> str:
    name = tensor.parameter.name
    if _is_heads(tensor):
        return HEADS
    named = {EMBEDDING: "embedding", LM_HEAD: "head"}
    return named.get(name, "shared experts" if _SHARED in name else "dense")


def facts_of_file(path: Path) -> dict[str, Any]:
    """What one safetensors file holds; raises CheckpointError."""
    specs = read_header(path).values()
    dtypes: Counter[str] = Counter()
    for spec in specs:
        dtypes[spec.dtype] += spec.nbytes
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "num_tensors": len(specs),
        "num_parameters": sum(math.prod(spec.shape) for spec in specs),
        "dtypes": dict(dtypes.most_common()),
        "tensors": _stems(spec.name for spec in specs),
    }


def _stems(names: Iterable[str]) -> dict[str, int]:
    """Tensors counted by the first two parts of their names that are no numbers."""
    stems: Counter[str] = Counter()
    for name in names:
        words = [word for word in name.split(".") if not word.isdigit()]
        stems[".".join(words[:2])] += 1
    return dict(stems.most_common())
