"""One expert, or one piece of a dense tensor, in the format that it gets: the work of a conversion.

Everything here is called by several threads at once; files, kernels and NumPy leave the
interpreter's lock alone meanwhile. Floats and fp8 become integer codes by the encoder that rounds
at load too, so that both give the same bits; codes are never rounded twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from colibri.checkpoint.coding import CODINGS, FloatMatrix, encoding, require_exact
from colibri.checkpoint.crc32c import crc32c
from colibri.checkpoint.expert_bytes import read_expert
from colibri.checkpoint.experts import ExpertIndex, ExpertLayerLayout
from colibri.checkpoint.importance import LayerImportance
from colibri.checkpoint.record import RecordLayout
from colibri.checkpoint.safetensors import TensorSpec, read_tensor
from colibri.checkpoint.storage import Storage, StoredMatrix
from colibri.errors import NumericsError
from colibri.formats import Bytes, FloatFormat, Floats, Format, FP8Format, IntegerFormat, Shape
from colibri.formats.packing import Items, item_nbytes
from colibri.kernels.packing import pack

_PIECE_NBYTES = 16 << 20  # of a dense tensor in memory at a time


class Record(NamedTuple):
    """An expert as it is written: its bytes and their CRC-32C."""

    data: Bytes
    checksum: int


def expert_record(
    index: ExpertIndex,
    layer: ExpertLayerLayout,
    layout: RecordLayout,
    expert: int,
    importance: LayerImportance | None = None,
) -> Record:
    """One expert of `layer`, laid out anew; `importance` weighs what rounding misses.

    Raises:
        CheckpointError: a file cannot be read or has become shorter.
        NumericsError: a weight is not finite, or has no code.
    """
    where = f"layer {layer.layer}, expert {expert}, "
    matrices = list(read_expert(index, layer, expert))
    weighed = (None, None, None) if importance is None else importance.of(expert)
    parts = zip(layer.parts, layout.parts, weighed, strict=True)
    for number, (old, new, given) in enumerate(parts):
        shape, what = (old.rows, old.columns), where + old.name
        matrices[number] = recode(matrices[number], old.format, new.format, shape, what, given)
    record = layout.assemble(*matrices)
    return Record(record, crc32c(record))


def recode(
    data: Bytes,
    old: Format,
    new: Format,
    shape: Shape,
    what: str,
    importance: Floats | None = None,
) -> Bytes:
    """Resident bytes in another format; the same bytes where it is the same.

    `importance [K]` is heeded by formats of integers with scales, see `IntegerFormat.encode`.

    Raises:
        UnsupportedModelError: codes would be rounded.
        NumericsError: a number is not finite, or has no code; `what` names the matrix.
    """
    if old is new:
        return data
    require_exact(old, new, what)
    if isinstance(old, FloatFormat | FP8Format) and CODINGS.get(new.name) is new:
        assert isinstance(new, IntegerFormat)
        return _encoded(data, old, new, shape, what, importance)
    return _recoded(data, old, new, shape, what, importance)


def _encoded(
    data: Bytes,
    old: FloatFormat | FP8Format,
    new: IntegerFormat,
    shape: Shape,
    what: str,
    importance: Floats | None,
) -> Bytes:
    storage, columns = Storage.of_resident(old), shape[1]
    codes = Items(0, storage.item, 0, storage.row_nbytes(columns), item_nbytes(storage.item))
    scales = None
    if isinstance(old, FP8Format):
        line = storage.blocks(*shape)[1] * storage.scale_nbytes
        scales = storage.scale_items(0, old.scales_at(shape), line)
    out = np.empty(new.resident_nbytes(shape), np.uint8)
    step = encoding(storage, shape, codes, scales, new, stride=new.panel_nbytes(columns))
    pieces = [data]
    if importance is not None:
        step, pieces = step._replace(importance=1), [data, importance.view(np.uint8)]
    if not pack(step, pieces, out):
        return _recoded(data, old, new, shape, what)  # it names the number
    return out


def _recoded(
    data: Bytes,
    old: Format,
    new: Format,
    shape: Shape,
    what: str,
    importance: Floats | None = None,
) -> Bytes:
    weights = old.decode(data, shape)
    try:
        if isinstance(new, IntegerFormat):
            return new.pack(new.encode(weights, importance), shape)
        return new.pack(new.encode(weights), shape)
    except NumericsError as error:
        raise NumericsError(f"{what}: {error}") from None


@dataclass(frozen=True, slots=True)
class DenseParameter:
    """One dense tensor to be rewritten.

    Attributes:
        name: its name in the container.
        shape: as the model sees it.
        spec: where it is now.
        stored: the format of its bytes there.
        format: the format it gets.
        matrix: its codes and scales, where its bytes there are not resident ones.
        part: what it belongs to, for people.
    """

    name: str
    shape: tuple[int, ...]
    spec: TensorSpec
    stored: Format
    format: Format
    matrix: StoredMatrix | None = None
    part: str = "dense"

    @property
    def extents(self) -> Shape:
        """`[N, K]`; a vector is one row."""
        shape = self.shape
        return (shape[0], shape[1]) if len(shape) == 2 else (1, math.prod(shape))

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the container."""
        return self.format.resident_nbytes(self.extents)

    @property
    def is_changed(self) -> bool:
        """Whether it gets another format."""
        return self.format is not self.stored

    def pieces(self) -> Iterator[Callable[[], Bytes]]:
        """Makes it piece by piece, in the order of its bytes."""
        as_it_is = self.matrix is None and self.format is self.stored
        if as_it_is and not self.spec.skip:
            for start in range(0, self.spec.nbytes, _PIECE_NBYTES):
                nbytes = min(_PIECE_NBYTES, self.spec.nbytes - start)
                yield _reading(replace(self.spec, offset=self.spec.offset + start, nbytes=nbytes))
        elif self._is_encoded:
            assert isinstance(self.format, IntegerFormat)
            source = FloatMatrix.of(self.stored, self.extents, self.spec, self.matrix)
            yield from source.encoders(self.format)
        else:
            yield self._whole

    @property
    def _is_encoded(self) -> bool:
        floats = isinstance(self.stored, FloatFormat | FP8Format)
        return floats and self.format is not self.stored and self.format.name in CODINGS

    def _whole(self) -> Bytes:
        return recode(self._read(), self.stored, self.format, self.extents, self.name)

    def _read(self) -> Bytes:
        """Its resident bytes in the format in which it is stored."""
        if self.matrix is None:
            return read_tensor(self.spec)
        out = np.empty(self.stored.resident_nbytes(self.extents), np.uint8)
        self.matrix.read(out)
        return out


def _reading(spec: TensorSpec) -> Callable[[], Bytes]:
    return lambda: read_tensor(spec)
