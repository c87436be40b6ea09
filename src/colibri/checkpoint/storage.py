"""How one matrix lies in files: plain, or codes with scales, told by names and dtypes.

| tensors of `q_proj` | format |
|---|---|
| `q_proj.weight` F32, F16, BF16 | the same |
| `q_proj.weight` F8_E4M3, `.weight_scale_inv` or `.scale` F32, BF16, E8M0 | fp8 |
| `q_proj.weight` I8, `.scale` E8M0 | mxfp4 |
| `q_proj.weight_packed` I32 or U8, `.weight_scale` | int4, mxfp4 |
| `q_proj.weight` Q4_K and other block types of GGUF files | see `formats.ggml` |
| `q_proj_blocks`, `q_proj_scales` U8 (of all experts) | mxfp4 |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from colibri.checkpoint.quantization import Quantization
from colibri.checkpoint.rename import Census
from colibri.checkpoint.safetensors import TensorSpec, read_tensor
from colibri.checkpoint.strict_json import shown
from colibri.errors import (
    CheckpointError,
    IncompleteModelError,
    NumericsError,
    UnsupportedModelError,
)
from colibri.formats import (
    BF16,
    F16,
    F32,
    MXFP4,
    Bytes,
    FloatFormat,
    Format,
    FP8Format,
    Shape,
    get_format,
)
from colibri.formats.ggml import BY_DTYPE
from colibri.formats.packing import (
    INT4_ZERO,
    ITEM_BF16,
    ITEM_BLOCK,
    ITEM_E4M3,
    ITEM_E8M0,
    ITEM_F16,
    ITEM_F32,
    ITEM_NIBBLE,
    Items,
    Packing,
    PackKind,
    item_nbytes,
)
from colibri.kernels.packing import all_finite, pack

FLOAT_DTYPES: dict[str, FloatFormat] = {"F32": F32, "F16": F16, "BF16": BF16}
_ITEMS = {"F32": ITEM_F32, "F16": ITEM_F16, "BF16": ITEM_BF16}
_ITEMS |= {"F8_E4M3": ITEM_E4M3, "F8_E8M0": ITEM_E8M0, "U8": ITEM_E8M0}
_FP8_SCALES = (".weight_scale_inv", ".scale", "_scale_inv")
_PER_ITEM = {"I32": 8, "I8": 2, "U8": 2}  # columns in one item of packed codes


@dataclass(frozen=True, slots=True)
class Storage:
    """How a matrix is stored.

    Attributes:
        format: the resident format that holds exactly its numbers.
        dtype: of the codes.
        tail: behind the stem, names the codes.
        scale_dtype: of the scales, "" without any.
        scale_tail: behind the stem, names the scales.
        block: rows and columns that share a scale.
    """

    format: Format
    dtype: str
    tail: str
    scale_dtype: str = ""
    scale_tail: str = ""
    block: Shape = (1, 1)

    @classmethod
    def of_resident(cls, fmt: FloatFormat | FP8Format) -> Storage:
        """How the resident bytes of a format hold its numbers."""
        if isinstance(fmt, FP8Format):
            return cls(fmt, "F8_E4M3", "", "F32", "", (fmt.block, fmt.block))
        return cls(fmt, fmt.name.upper(), "")

    @property
    def item(self) -> int:
        """The kind of codes."""
        if self.is_blocks:
            return ITEM_BLOCK + BY_DTYPE[self.dtype].number
        return ITEM_NIBBLE if self.dtype in _PER_ITEM else _ITEMS[self.dtype]

    @property
    def is_blocks(self) -> bool:
        """Whether it is a block type of a GGUF file."""
        return self.dtype in BY_DTYPE

    def row_nbytes(self, columns: int) -> int:
        """Bytes of a row of codes."""
        if self.is_blocks:
            return BY_DTYPE[self.dtype].row_nbytes(columns)
        return columns // 2 if self.dtype in _PER_ITEM else columns * item_nbytes(self.item)

    @property
    def scale_nbytes(self) -> int:
        """Bytes of a scale."""
        return item_nbytes(_ITEMS[self.scale_dtype]) if self.scale_dtype else 0

    def blocks(self, rows: int, columns: int) -> Shape:
        """The shape of the scales."""
        return -(-rows // self.block[0]), -(-columns // self.block[1])

    def scale_items(self, piece: int, start: int, row_step: int) -> Items:
        """Scales that follow one another along columns."""
        return Items(piece, _ITEMS[self.scale_dtype], start, row_step, self.scale_nbytes)


def find(census: Census, stem: str, quantization: Quantization) -> Storage | None:
    """How the matrix `stem` is stored; None where there is no such matrix.

    Raises:
        UnsupportedModelError: its dtype is not read, or config.json does not say how.
        IncompleteModelError: its scales are missing.
    """
    for tail in (".weight", "", ".weight_packed", "_blocks"):
        if spec := census.get(stem + tail):
            return _storage(census, stem, tail, spec, quantization)
    return None


def _storage(
    census: Census, stem: str, tail: str, spec: TensorSpec, quantization: Quantization
) -> Storage:
    dtype = spec.dtype
    if tail == "_blocks" and dtype == "U8":
        return Storage(MXFP4, dtype, tail, *_scales(census, stem, spec, ("_scales",)), (1, 32))
    if tail == ".weight_packed":
        return _packed(census, stem, spec, quantization)
    if dtype in BY_DTYPE:
        return Storage(BY_DTYPE[dtype].format, dtype, tail)
    if dtype in FLOAT_DTYPES:
        return Storage(FLOAT_DTYPES[dtype], dtype, tail)
    if dtype == "F8_E4M3":
        fmt, block = quantization.fp8, quantization.block
        if fmt is None or block is None:
            refuse(spec, "config.json has no quantization_config.weight_block_size for it")
        return Storage(fmt, dtype, tail, *_scales(census, stem, spec, _FP8_SCALES), block)
    if dtype == "I8" and stem + ".scale" in census:
        return Storage(MXFP4, dtype, tail, *_scales(census, stem, spec, (".scale",)), (1, 32))
    refuse(spec, f"wanted dtype {', '.join(FLOAT_DTYPES)} or F8_E4M3, found {dtype}")


def _packed(census: Census, stem: str, spec: TensorSpec, quantization: Quantization) -> Storage:
    scales = _scales(census, stem, spec, (".weight_scale",))
    if spec.dtype == "U8":
        return Storage(MXFP4, "U8", ".weight_packed", *scales, (1, 32))
    if spec.dtype != "I32" or quantization.group is None:
        refuse(spec, f"config.json does not say how to read packed codes of dtype {spec.dtype}")
    if scales[0] not in ("BF16", "F16"):
        refuse(spec, f"wanted scales of BF16 or F16, found {scales[0]}")
    name = f"int4-g{quantization.group}{'-bf16' if scales[0] == 'BF16' else ''}"
    return Storage(get_format(name), "I32", ".weight_packed", *scales, (1, quantization.group))


def _scales(census: Census, stem: str, spec: TensorSpec, tails: tuple[str, ...]) -> tuple[str, str]:
    """Dtype and tail of the scales."""
    for tail in tails:
        if found := census.get(stem + tail):
            allowed = ("F8_E8M0", "U8") if spec.dtype in ("I8", "U8") else ("F32", "BF16", "F16")
            if found.dtype not in allowed and not (
                spec.dtype == "F8_E4M3" and found.dtype == "F8_E8M0"
            ):
                refuse(found, f"wanted scales of {', '.join(allowed)}, found {found.dtype}")
            return found.dtype, tail
    raise IncompleteModelError(
        f"{spec.file}: tensor {shown(spec.name)} has no scales:"
        f" wanted {' or '.join(shown(stem + tail) for tail in tails)}, found none"
    )


def take(
    census: Census, stem: str, storage: Storage, shape: Shape, lead: tuple[int, ...] = ()
) -> tuple[TensorSpec, TensorSpec | None]:
    """Take codes and scales of `shape`, of `lead` matrices in one tensor.

    Raises:
        IncompleteModelError: one is missing.
        CheckpointError: one has another shape.
        UnsupportedModelError: another dtype than `storage` says, or rows that are not whole words.
    """
    rows, columns = shape
    stored: tuple[int, ...] = (rows, columns)
    if per := _PER_ITEM.get(storage.dtype):
        whole = 32 if storage.tail == "_blocks" else 8
        stored = (rows, columns // 32, 16) if storage.tail == "_blocks" else (rows, columns // per)
        if columns % whole:
            raise UnsupportedModelError(
                f"matrix {shown(stem)}: packed rows of {columns} columns are not read: wanted a"
                f" multiple of {whole}"
            )
    codes = _take(census, stem + storage.tail, (*lead, *stored), storage.dtype)
    if not storage.scale_dtype:
        return codes, None
    scales = (*lead, *storage.blocks(rows, columns))
    if storage.tail == ".weight_packed" and stem + ".weight_shape" in census:
        _check_shape(census.take(stem + ".weight_shape", (2,)), shape)
    return codes, _take(census, stem + storage.scale_tail, scales, storage.scale_dtype)


def _check_shape(spec: TensorSpec, shape: Shape) -> None:
    """What a checkpoint says of the shape of packed codes, in numbers beside them."""
    kind = {"I64": "<i8", "I32": "<i4"}.get(spec.dtype)
    if kind is None:
        refuse(spec, f"wanted dtype I64 or I32, found {spec.dtype}")
    found = read_tensor(spec).view(kind).tolist()
    if found != [*shape]:
        raise CheckpointError(
            f"{spec.file}: tensor {shown(spec.name)} says shape {found}, wanted {[*shape]};"
            " fetch the checkpoint again"
        )


def _take(census: Census, name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
    spec = census.take(name, shape)
    if spec.dtype != dtype:
        refuse(spec, f"wanted dtype {dtype} as in the others, found {spec.dtype}")
    return spec


def packings(
    storage: Storage,
    shape: Shape,
    codes: Items,
    scales: Items | None,
    *,
    part: int = 0,
    stride: int = 0,
    resident: bool = False,
) -> list[Packing]:
    """The steps that make a matrix resident in its own format, `stride` from panel to panel.

    `resident` says that its codes already lie where they shall be, and only scales are missing.
    """
    fmt, moves = storage.format, []
    if storage.is_blocks:
        return [Packing(PackKind.BLOCKS, part, False, 0, *shape, codes, panel_stride=stride)]
    if storage.item == ITEM_NIBBLE:
        assert scales is not None
        zero = 0 if fmt is MXFP4 else INT4_ZERO
        about = (4, fmt.group, zero, stride)
        panels = Packing(PackKind.PANELS, part, False, 0, *shape, codes, scales, (1, 1), *about)
        return [panels]
    if not resident:
        moves.append(Packing(PackKind.MOVE, part, False, 0, *shape, codes))
    if isinstance(fmt, FP8Format):
        assert scales is not None
        at, block = fmt.scales_at(shape), fmt.block
        repeats = (storage.block[0] // block, storage.block[1] // block)
        blocks = (-(-shape[0] // block), -(-shape[1] // block))
        moves.append(Packing(PackKind.FLOATS, part, False, at, *blocks, scales, None, repeats))
    return moves


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One coded matrix: its tensors, and how they become resident.

    Attributes:
        storage: how it is stored.
        shape: `[N, K]`.
        codes: the tensor of codes.
        scales: the tensor of scales, where it has any.
    """

    storage: Storage
    shape: Shape
    codes: TensorSpec
    scales: TensorSpec | None

    def read(self, out: Bytes) -> None:
        """Write the resident bytes to `out [resident_nbytes]`.

        Raises:
            CheckpointError: a file cannot be read or has become shorter.
            NumericsError: a code or a scale is not finite.
        """
        storage, columns = self.storage, self.shape[1]
        row, size = storage.row_nbytes(columns), item_nbytes(storage.item)
        codes, scales = Items(0, storage.item, 0, row, size), None
        pieces = [read_tensor(self.codes)]
        if self.scales is not None:
            scale_row = storage.blocks(*self.shape)[1] * storage.scale_nbytes
            scales = storage.scale_items(1, 0, scale_row)
            pieces.append(read_tensor(self.scales))
        fmt, stride = storage.format, storage.format.panel_nbytes(columns)
        for step in packings(storage, self.shape, codes, scales, stride=stride):
            if not pack(step, pieces, out[step.to :]):
                self._broken(self.scales or self.codes, "scale")
        if not all_finite(out, fmt.scans(self.shape, stride)):
            self._broken(self.codes, "code or scale")

    def _broken(self, spec: TensorSpec, what: str) -> NoReturn:
        raise NumericsError(
            f"{spec.file}: tensor {shown(spec.name)} holds a {what} that is not finite;"
            " fetch the file again"
        )


def take_matrix(
    census: Census, name: str, shape: Shape, quantization: Quantization
) -> StoredMatrix | None:
    """Take the dense matrix `name` (with its `.weight`) if it is coded; None where it is not.

    Raises: as `find` and `take`.
    """
    stem = name.removesuffix(".weight")
    storage = find(census, stem, quantization)
    if storage is None or not (storage.scale_dtype or storage.is_blocks):
        return None
    codes, scales = take(census, stem, storage, shape)
    return StoredMatrix(storage, shape, codes, scales)


def refuse(spec: TensorSpec, problem: str) -> NoReturn:
    """Raise UnsupportedModelError that names file and tensor."""
    raise UnsupportedModelError(f"{spec.file}: tensor {shown(spec.name)}: {problem}")
