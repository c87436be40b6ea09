"""How checkpoints spell the experts of a layer; spellings are told by name, never by size."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.checkpoint.quantization import Quantization
from colibri.checkpoint.rename import Census
from colibri.checkpoint.safetensors import TensorSpec
from colibri.checkpoint.storage import Storage, find, refuse, take
from colibri.checkpoint.strict_json import shown
from colibri.errors import CheckpointError, IncompleteModelError
from colibri.formats import FloatFormat, Shape
from colibri.formats.packing import ITEM_BF16, ITEM_F16, ITEM_F32, Items, item_nbytes

_BIAS_ITEMS = {"F32": ITEM_F32, "F16": ITEM_F16, "BF16": ITEM_BF16}


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The routed experts that one layer needs.

    Attributes:
        layer: the layer's number in the model.
        prefix: canonical name of the list: "model.layers.3.mlp.experts".
        num_experts: E.
        hidden_size: D.
        intermediate_size: F.
        transposed: whether fused matrices of floats are stored `[E, in, out]`.
        interleaved: whether rows of gate and up alternate where one tensor holds both.
        biased: whether each part has a bias.
    """

    layer: int
    prefix: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    transposed: bool = False
    interleaved: bool = False
    biased: bool = False


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to store a layer's experts.

    Attributes:
        stems: names behind the prefix (and the expert's number, unless fused), the one with the
            gate first; `storage` says how they go on.
        parts: the parts (0 gate, 1 up, 2 down) in each matrix, in order of rows.
        fused: one tensor holds all experts, `[E, rows, columns]`.
        interleaved: rows of gate and up alternate, whatever the family says.
    """

    stems: tuple[str, ...]
    parts: tuple[tuple[int, ...], ...]
    fused: bool
    interleaved: bool = False

    def stem(self, request: ExpertLayer, number: int, expert: int = 0) -> str:
        """Canonical name of a matrix without its tail."""
        middle = "" if self.fused else f"{expert}."
        return f"{request.prefix}.{middle}{self.stems[number]}"

    def is_used(self, request: ExpertLayer, census: Census) -> bool:
        """Whether any gate is stored in this spelling."""
        tails = ("", ".weight", "_blocks") if self.fused else (".weight", ".weight_packed")
        return any(
            self.stem(request, 0, expert) + tail in census
            for expert in range(1 if self.fused else request.num_experts)
            for tail in tails
        )


_SEPARATE = ((0,), (1,), (2,))
SPELLINGS = (
    Spelling(("gate_proj", "up_proj", "down_proj"), _SEPARATE, False),
    Spelling(("w1", "w3", "w2"), _SEPARATE, False),
    Spelling(("gate_up_proj", "down_proj"), ((0, 1), (2,)), True),
    Spelling(("gate_proj", "up_proj", "down_proj"), _SEPARATE, True),
    Spelling(("w13_weight", "w2_weight"), ((0, 1), (2,)), True, True),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is read of each expert at one place.

    Attributes:
        specs: the tensor of each expert, or the one that holds all, one after another.
        nbytes: of one expert.
    """

    specs: list[TensorSpec]
    nbytes: int


@dataclass(frozen=True, slots=True)
class PartSource:
    """Where one part lies in the pieces.

    Attributes:
        storage: how it is stored.
        codes: its codes or floats.
        scales: its scales, where it has any.
        bias: its bias, as items of one row.
        in_rows: whether its codes are row-major without gaps.
        shares: whether other parts lie in the same piece.
    """

    storage: Storage
    codes: Items
    scales: Items | None
    bias: Items | None
    in_rows: bool
    shares: bool

    @property
    def is_direct(self) -> bool:
        """Whether its codes may be read straight to where the kernels find them."""
        is_float = isinstance(self.storage.format, FloatFormat)
        return self.in_rows and (is_float or (self.storage.dtype == "F8_E4M3" and not self.shares))


@dataclass(slots=True)
class LayerSources:
    """Pieces of a layer's experts, and where gate (0), up (1) and down (2) are in them."""

    pieces: list[Piece]
    parts: dict[int, PartSource]

    def add(self, specs: list[TensorSpec], num_experts: int) -> int:
        """The number of a new piece."""
        nbytes = specs[0].nbytes // (num_experts // len(specs))
        self.pieces.append(Piece(specs, nbytes))
        return len(self.pieces) - 1


def part_shape(request: ExpertLayer, part: int) -> tuple[int, int]:
    """Rows and columns of gate (0), up (1) or down (2)."""
    ffn, hidden = request.intermediate_size, request.hidden_size
    return (hidden, ffn) if part == 2 else (ffn, hidden)


def take_sources(census: Census, request: ExpertLayer, quantization: Quantization) -> LayerSources:
    """Take a layer's experts out of the census, in whatever spelling they are.

    Raises:
        IncompleteModelError: tensors are missing; gives found and expected counts.
        CheckpointError: two spellings at once, or a wrong shape.
        UnsupportedModelError: a dtype or an orientation that is not read.
    """
    spelling, found = _spelling(census, request), LayerSources([], {})
    storages = _storages(census, request, spelling, quantization)
    for number, storage in enumerate(storages):
        _take(census, request, spelling, number, storage, found)
    return found


def _spelling(census: Census, request: ExpertLayer) -> Spelling:
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
    number, tail = ("", "") if spelling.fused else ("N.", ".weight")
    return shown(f"{request.prefix}.{number}{spelling.stems[0]}{tail}")


def _storages(
    census: Census, request: ExpertLayer, spelling: Spelling, quantization: Quantization
) -> list[Storage]:
    """How each matrix is stored; all tensors are there."""
    found, missing, wanted = [], [], 0
    for number in range(len(spelling.stems)):
        stems = [
            spelling.stem(request, number, expert)
            for expert in range(1 if spelling.fused else request.num_experts)
        ]
        if spelling.fused and stems[0] in census and f"{stems[0]}.weight" in census:
            raise CheckpointError(
                f"tensors {shown(stems[0])} and {shown(f'{stems[0]}.weight')} mean the same"
            )
        known = (storage for stem in stems if (storage := find(census, stem, quantization)))
        storage = next(known, None)
        tail = ("" if spelling.fused else ".weight") if storage is None else storage.tail
        wanted += len(stems)
        missing += [stem + tail for stem in stems if stem + tail not in census]
        if storage is not None:
            found.append(storage)
    if missing:
        raise IncompleteModelError(
            f"layer {request.layer}: found {wanted - len(missing)} of {wanted} tensors"
            f" of {request.num_experts} experts; missing is {shown(missing[0])}"
            f"{f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''};"
            " spellings are not mixed within a layer; fetch the checkpoint again"
        )
    return found


def _take(
    census: Census,
    request: ExpertLayer,
    spelling: Spelling,
    number: int,
    storage: Storage,
    found: LayerSources,
) -> None:
    """Take one matrix of every expert, and say where its parts are."""
    parts, experts = spelling.parts[number], request.num_experts
    part_rows, columns = part_shape(request, parts[0])
    shape = (part_rows * len(parts), columns)
    is_float = isinstance(storage.format, FloatFormat)
    turned = spelling.fused and request.transposed and is_float
    stored, lead = shape[::-1] if turned else shape, (experts,) if spelling.fused else ()
    if spelling.fused and is_float:
        _check_orientation(census, spelling.stem(request, number) + storage.tail, (*lead, *stored))
    taken = [
        take(census, spelling.stem(request, number, expert), storage, stored, lead)
        for expert in range(1 if spelling.fused else experts)
    ]
    codes = found.add([spec for spec, _ in taken], experts)
    scales = found.add([s for _, s in taken if s], experts) if storage.scale_dtype else None
    alternate = len(parts) > 1 and (request.interleaved or spelling.interleaved)
    biases = _biases(census, request, spelling, number, shape[0], found)
    for place, part in enumerate(parts):
        step = len(parts) if alternate else 1
        first = place if alternate else place * part_rows
        if turned:
            size = storage.row_nbytes(1)
            where = Items(codes, storage.item, first * size, step * size, shape[0] * size)
        else:
            row, size = storage.row_nbytes(columns), item_nbytes(storage.item)
            where = Items(codes, storage.item, first * row, step * row, size)
        found.parts[part] = PartSource(
            storage,
            where,
            None if scales is None else _scales(storage, scales, shape, first, step, taken[0][1]),
            None
            if biases is None
            else biases._replace(
                start=first * item_nbytes(biases.kind), column_step=step * item_nbytes(biases.kind)
            ),
            not turned and not alternate,
            len(parts) > 1,
        )


def _scales(
    storage: Storage, piece: int, shape: Shape, first: int, step: int, spec: TensorSpec | None
) -> Items:
    """Scales of rows `first`, `first + step` and so on."""
    down = storage.block[0]
    row = storage.blocks(*shape)[1] * storage.scale_nbytes
    if down > 1 and (step > 1 or first % down):
        assert spec is not None
        refuse(spec, f"blocks of {down} rows hold rows of gate and up; such experts are not read")
    return storage.scale_items(piece, first // down * row, step * row)


def _biases(
    census: Census,
    request: ExpertLayer,
    spelling: Spelling,
    number: int,
    rows: int,
    found: LayerSources,
) -> Items | None:
    if not request.biased:
        return None
    lead, tail = ((request.num_experts,), "_bias") if spelling.fused else ((), ".bias")
    specs = [
        census.take(spelling.stem(request, number, expert) + tail, (*lead, rows))
        for expert in range(1 if spelling.fused else request.num_experts)
    ]
    for spec in specs:
        if spec.dtype not in _BIAS_ITEMS or spec.dtype != specs[0].dtype:
            refuse(spec, f"wanted dtype {', '.join(_BIAS_ITEMS)}, found {spec.dtype}")
    return Items(found.add(specs, request.num_experts), _BIAS_ITEMS[specs[0].dtype], 0, 0, 0)


def _check_orientation(census: Census, name: str, shape: tuple[int, ...]) -> None:
    """A square matrix has the orientation of its family; any other tells its own."""
    spec = census.get(name)
    other = (*shape[:-2], shape[-1], shape[-2])
    if spec and spec.shape == other != shape:
        problem = f"wanted {list(shape)}, found the transposed {list(spec.shape)}"
        refuse(spec, f"{problem}; such experts are not read")
