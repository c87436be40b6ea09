"""How a container lays out one expert: its parts in one piece, as the kernels read them.

Gate and up of a coded format alternate panel by panel (gate panel 0, up panel 0, gate panel 1, …),
so that one pass over the record meets both rows of a neuron; then come the panels of down.
Row-major floats, and gate and up that are coded differently, lie one after another; biases, where
experts have any, come last as float32. What starts after something else is padded to 64 bytes, the
record to 4096.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from colibri.formats import F32, Bytes, Format, Shape, get_format, padded
from colibri.kernels.api import ExpertPart

PAGE = 4096  # alignment of direct reads and of slots
_PART_ALIGN = 64
_BIAS_TAIL = ".bias"
PartName: TypeAlias = Literal["gate_proj", "up_proj", "down_proj"]
PART_NAMES: tuple[PartName, PartName, PartName] = ("gate_proj", "up_proj", "down_proj")
BIAS_NAMES = tuple(name + _BIAS_TAIL for name in PART_NAMES)


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where the parts of a record lie.

    Attributes:
        parts: gate, up and down.
        offsets: byte offset in the record of each part's first panel.
        nbytes: bytes of the record, a multiple of 4096.
        biases: byte offset in the record of each part's bias `[N]` float32, where it has any.
    """

    parts: tuple[ExpertPart, ExpertPart, ExpertPart]
    offsets: tuple[int, int, int]
    nbytes: int
    biases: tuple[int, int, int] | None = None

    @classmethod
    def of(
        cls,
        formats: tuple[Format, Format, Format],
        shapes: tuple[Shape, Shape, Shape],
        *,
        biased: bool = False,
    ) -> RecordLayout:
        """The layout of matrices `[N, K]` gate, up and down of these formats."""
        sizes = [fmt.resident_nbytes(shape) for fmt, shape in zip(formats, shapes, strict=True)]
        panels = [fmt.panel_nbytes(shape[1]) for fmt, shape in zip(formats, shapes, strict=True)]
        if formats[0].is_coded and formats[0] is formats[1] and shapes[0] == shapes[1]:
            up, down = panels[0], padded(2 * sizes[0], _PART_ALIGN)
            panels[0] = panels[1] = 2 * panels[0]
        else:
            up = padded(sizes[0], _PART_ALIGN)
            down = up + padded(sizes[1], _PART_ALIGN)
        gate, up_part, down_part = (
            ExpertPart(name, fmt, shape[0], shape[1], stride)
            for name, fmt, shape, stride in zip(PART_NAMES, formats, shapes, panels, strict=True)
        )
        parts, end, biases = (gate, up_part, down_part), down + sizes[2], []
        for part in parts if biased else ():
            biases.append(padded(end, _PART_ALIGN))
            end = biases[-1] + 4 * part.rows
        places = (biases[0], biases[1], biases[2]) if biased else None
        return cls(parts, (0, up, down), padded(end, PAGE), places)

    @classmethod
    def uniform(
        cls, fmt: Format, hidden_size: int, intermediate_size: int, *, biased: bool = False
    ) -> RecordLayout:
        """The layout of a gated expert `D -> F -> D` in one format."""
        wide, narrow = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
        return cls.of((fmt, fmt, fmt), (wide, wide, narrow), biased=biased)

    @classmethod
    def from_json(cls, parts: list[Mapping[str, Any]]) -> RecordLayout:
        """What `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: not of that form.
            UnsupportedModelError: an unknown format.
        """
        names, biases = tuple(part["name"] for part in parts), parts[3:]
        if names not in (PART_NAMES, (*PART_NAMES, *BIAS_NAMES)):
            raise ValueError(f"parts must be {', '.join(PART_NAMES)}, and biases of all or none")
        gate, up, down = ((get_format(part["format"]), _shape(part["shape"])) for part in parts[:3])
        layout = cls.of((gate[0], up[0], down[0]), (gate[1], up[1], down[1]), biased=bool(biases))
        if biases != layout.to_json()[3:]:
            raise ValueError(f"biases must be {layout.to_json()[3:]}")
        return layout

    def to_json(self) -> list[dict[str, Any]]:
        """Names, formats and shapes in record order; offsets and strides follow from them."""
        matrices: list[dict[str, Any]] = [
            {"name": p.name, "format": p.format.name, "shape": [p.rows, p.columns]}
            for p in self.parts
        ]
        biases = [
            {"name": name, "format": F32.name, "shape": [part.rows]}
            for name, part in zip(BIAS_NAMES, self.parts, strict=True)
        ]
        return matrices + (biases if self.biases else [])

    def assemble(self, *data: Bytes, out: Bytes | None = None) -> Bytes:
        """The record `[nbytes]` of resident gate, up and down, then their biases if it has any.

        Padding is zero, or as it was in `out`.
        """
        record = np.zeros(self.nbytes, np.uint8) if out is None else out
        for index, one in zip(range(self._count), data, strict=True):
            for into, source in self._windows(record, index, one):
                into[...] = source
        return record

    def split(self, record: Bytes) -> tuple[Bytes, ...]:
        """What `assemble` joined: views of what lies in one piece, copies of what does not."""
        sizes = [p.format.resident_nbytes((p.rows, p.columns)) for p in self.parts]
        sizes += [4 * part.rows for part in self.parts]
        return tuple(self._part(record, i, size) for i, size in enumerate(sizes[: self._count]))

    def _part(self, record: Bytes, index: int, nbytes: int) -> Bytes:
        if index < len(self.parts):
            part, offset = self.parts[index], self.offsets[index]
            if part.panel_stride == part.format.panel_nbytes(part.columns):
                self._require_whole(record)
                return record[offset : offset + nbytes]
        found = np.empty(nbytes, np.uint8)
        for source, into in self._windows(record, index, found):
            into[...] = source
        return found

    def _require_whole(self, record: Bytes) -> None:
        if record.size != self.nbytes:
            raise ValueError(f"a record of {record.size} bytes, should be of {self.nbytes}")

    @property
    def _count(self) -> int:
        """Matrices, and biases."""
        return 6 if self.biases else 3

    def _windows(
        self, record: Bytes, index: int, data: Bytes
    ) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Pairs of views, in record and matrix: whole panels, and rows that fill none."""
        if index >= len(self.parts):
            assert self.biases is not None
            start = self.biases[index - len(self.parts)]
            return [(record[start : start + 4 * self.parts[index - len(self.parts)].rows], data)]
        part, offset = self.parts[index], self.offsets[index]
        wanted = part.format.resident_nbytes((part.rows, part.columns))
        if (record.size, data.size) != (self.nbytes, wanted):
            raise ValueError(
                f"{part.name}: {data.size} bytes in a record of {record.size}, should be {wanted}"
                f" in one of {self.nbytes}"
            )
        panel = part.format.panel_nbytes(part.columns)
        count = data.size // panel
        lanes = np.lib.stride_tricks.as_strided(
            record[offset:],
            (count, panel),
            (part.panel_stride, 1),
            writeable=record.flags.writeable,
        )
        rest = offset + count * part.panel_stride
        return [
            (lanes, data[: count * panel].reshape(count, panel)),
            (record[rest : rest + data.size - count * panel], data[count * panel :]),
        ]


def _shape(value: list[int]) -> Shape:
    """A shape out of JSON."""
    rows, columns = value
    if not all(type(n) is int and 0 < n < 1 << 31 for n in (rows, columns)):
        raise ValueError(f"{value} is no shape")
    return rows, columns
