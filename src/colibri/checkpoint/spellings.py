"""How checkpoints spell the experts of a layer; spellings are told by name, never by size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from colibri.checkpoint.rename import Census
from colibri.checkpoint.safetensors import TensorSpec
from colibri.checkpoint.strict_json import shown
from colibri.errors import CheckpointError, IncompleteModelError, UnsupportedModelError
from colibri.formats import BF16, F16, F32, FloatFormat

_FORMATS: dict[str, FloatFormat] = {"F32": F32, "F16": F16, "BF16": BF16}


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The routed experts that one layer needs.

    Attributes:
        layer: the layer's number in the model.
        prefix: canonical name of the list: "model.layers.3.mlp.experts".
        num_experts: E.
        hidden_size: D.
        intermediate_size: F.
    """

    layer: int
    prefix: str
    num_experts: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to store a layer's experts.

    Attributes:
        pieces: names behind the prefix (and the expert's number, unless fused), the one with the
            gate first.
        parts: the parts (0 gate, 1 up, 2 down) in each piece, in order of rows.
        fused: one tensor holds all experts, `[E, rows, columns]`; its name may end in `.weight`.
    """

    pieces: tuple[str, ...]
    parts: tuple[tuple[int, ...], ...]
    fused: bool

    def names(self, request: ExpertLayer, piece: int, census: Census) -> list[str]:
        """Canonical names of a piece: of every expert, or the one fused tensor."""
        if not self.fused:
            tail = self.pieces[piece]
            return [f"{request.prefix}.{expert}.{tail}" for expert in range(request.num_experts)]
        name = f"{request.prefix}.{self.pieces[piece]}"
        weight = f"{name}.weight"
        if name in census and weight in census:
            raise CheckpointError(f"tensors {shown(name)} and {shown(weight)} mean the same")
        return [weight if weight in census else name]

    def is_used(self, request: ExpertLayer, census: Census) -> bool:
        """Whether any gate is stored in this spelling."""
        return any(name in census for name in self.names(request, 0, census))


_SEPARATE = ((0,), (1,), (2,))
SPELLINGS = (
    Spelling(("gate_proj.weight", "up_proj.weight", "down_proj.weight"), _SEPARATE, False),
    Spelling(("w1.weight", "w3.weight", "w2.weight"), _SEPARATE, False),
    Spelling(("gate_up_proj", "down_proj"), ((0, 1), (2,)), True),
    Spelling(("gate_proj", "up_proj", "down_proj"), _SEPARATE, True),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of every expert of a layer.

    Attributes:
        format: of its matrices.
        parts: the parts in it, in order of rows.
        rows: of all its parts together.
        columns: of each.
        specs: the tensor of each expert, or the one that holds all.
    """

    format: FloatFormat
    parts: tuple[int, ...]
    rows: int
    columns: int
    specs: list[TensorSpec]


def part_shape(request: ExpertLayer, part: int) -> tuple[int, int]:
    """Rows and columns of gate (0), up (1) or down (2)."""
    ffn, hidden = request.intermediate_size, request.hidden_size
    return (hidden, ffn) if part == 2 else (ffn, hidden)


def take_pieces(census: Census, request: ExpertLayer) -> list[Piece]:
    """Take a layer's experts out of the census, in whatever spelling they are.

    Raises:
        IncompleteModelError: tensors are missing; gives found and expected counts.
        CheckpointError: two spellings at once, or a wrong shape.
        UnsupportedModelError: a dtype or an orientation that is not read.
    """
    spelling = _find(census, request)
    _check_complete(census, request, spelling)
    return [_take(census, request, spelling, piece) for piece in range(len(spelling.pieces))]


def _find(census: Census, request: ExpertLayer) -> Spelling:
    used = [spelling for spelling in SPELLINGS if spelling.is_used(request, census)]
    if len(used) > 1:
        names = " and ".join(_spelled(request, spelling) for spelling in used)
        raise CheckpointError(
            f"layer {request.layer}: experts are stored twice or in mixed spellings: {names};"
            " keep one of them"
        )
    if not used:
        prefix = f"{request.prefix}."
        raise IncompleteModelError(
            f"layer {request.layer}: wanted {request.num_experts} experts under {shown(prefix)} as"
            f" {' or '.join(_spelled(request, spelling) for spelling in SPELLINGS)};"
            f" found no gate among the {census.count(prefix)} tensors there"
        )
    return used[0]


def _spelled(request: ExpertLayer, spelling: Spelling) -> str:
    number = "" if spelling.fused else "N."
    return shown(f"{request.prefix}.{number}{spelling.pieces[0]}")


def _check_complete(census: Census, request: ExpertLayer, spelling: Spelling) -> None:
    wanted = [
        name
        for piece in range(len(spelling.pieces))
        for name in spelling.names(request, piece, census)
    ]
    if missing := [name for name in wanted if name not in census]:
        raise IncompleteModelError(
            f"layer {request.layer}: found {len(wanted) - len(missing)} of {len(wanted)} tensors"
            f" of {request.num_experts} experts; missing is {shown(missing[0])}"
            f"{f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''};"
            " spellings are not mixed within a layer; fetch the checkpoint again"
        )


def _take(census: Census, request: ExpertLayer, spelling: Spelling, piece: int) -> Piece:
    parts = spelling.parts[piece]
    rows = sum(part_shape(request, part)[0] for part in parts)
    columns = part_shape(request, parts[0])[1]
    names = spelling.names(request, piece, census)
    fmt = _format(census, names)
    if spelling.fused:
        shape = (request.num_experts, rows, columns)
        _check_orientation(census, names[0], shape)
        specs = [census.take(names[0], shape)]
    else:
        specs = [census.take(name, (rows, columns)) for name in names]
    return Piece(fmt, parts, rows, columns, specs)


def _format(census: Census, names: list[str]) -> FloatFormat:
    """The one format of these tensors, all of which are there."""
    dtypes: dict[str, TensorSpec] = {}
    for name in names:
        if spec := census.get(name):
            dtypes.setdefault(spec.dtype, spec)
    for dtype, spec in dtypes.items():
        if dtype not in _FORMATS:
            _refuse(spec, f"wanted dtype {', '.join(_FORMATS)}, found {dtype}")
    if len(dtypes) > 1:
        first, second, *_ = dtypes.values()
        _refuse(second, f"wanted dtype {first.dtype} as {shown(first.name)}, found {second.dtype}")
    return _FORMATS[next(iter(dtypes))]


def _check_orientation(census: Census, name: str, shape: tuple[int, int, int]) -> None:
    """A square matrix has the orientation of its spelling; any other tells its own."""
    spec = census.get(name)
    transposed = (shape[0], shape[2], shape[1])
    if spec and spec.shape == transposed != shape:
        _refuse(spec, f"wanted {list(shape)}, found the transposed {list(spec.shape)}")


def _refuse(spec: TensorSpec, problem: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{spec.file}: tensor {shown(spec.name)}: {problem}; such experts are not read"
    )
