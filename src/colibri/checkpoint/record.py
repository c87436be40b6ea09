"""How a container lays out one expert: its parts in one piece, as the kernels read them.

Gate and up of a coded format alternate panel by panel (gate panel 0, up panel 0, gate panel 1, …),
so that one pass over the record meets both rows of a neuron; then come the panels of down.
Row-major floats, and gate and up that are coded differently, lie one after another. What starts
after something else is padded to 64 bytes, the record to 4096.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from colibri.formats import Bytes, Format, Shape, get_format, padded
from colibri.kernels.api import ExpertPart

PAGE = 4096  # alignment of direct reads and of slots
_PART_ALIGN = 64
PartName: TypeAlias = Literal["gate_proj", "up_proj", "down_proj"]
PART_NAMES: tuple[PartName, PartName, PartName] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where the parts of a record lie.

    Attributes:
        parts: gate, up and down.
        offsets: byte offset in the record of each part's first panel.
        nbytes: bytes of the record, a multiple of 4096.
    """

    parts: tuple[ExpertPart, ExpertPart, ExpertPart]
    offsets: tuple[int, int, int]
    nbytes: int

    @classmethod
    def of(
        cls, formats: tuple[Format, Format, Format], shapes: tuple[Shape, Shape, Shape]
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
        return cls((gate, up_part, down_part), (0, up, down), padded(down + sizes[2], PAGE))

    @classmethod
    def uniform(cls, fmt: Format, hidden_size: int, intermediate_size: int) -> RecordLayout:
        """The layout of a gated expert `D -> F -> D` in one format."""
        wide, narrow = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
        return cls.of((fmt, fmt, fmt), (wide, wide, narrow))

    @classmethod
    def from_json(cls, parts: list[Mapping[str, Any]]) -> RecordLayout:
        """What `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: not of that form.
            UnsupportedModelError: an unknown format.
        """
        if tuple(part["name"] for part in parts) != PART_NAMES:
            raise ValueError(f"parts must be {', '.join(PART_NAMES)}")
        gate, up, down = ((get_format(part["format"]), _shape(part["shape"])) for part in parts)
        return cls.of((gate[0], up[0], down[0]), (gate[1], up[1], down[1]))

    def to_json(self) -> list[dict[str, Any]]:
        """Names, formats and shapes in record order; offsets and strides follow from them."""
        return [
            {"name": p.name, "format": p.format.name, "shape": [p.rows, p.columns]}
            for p in self.parts
        ]

    def assemble(self, gate: Bytes, up: Bytes, down: Bytes, out: Bytes | None = None) -> Bytes:
        """The record `[nbytes]` of resident matrices; padding is zero, or as it was in `out`."""
        record = np.zeros(self.nbytes, np.uint8) if out is None else out
        for index, data in enumerate((gate, up, down)):
            for into, source in self._windows(record, index, data):
                into[...] = source
        return record

    def split(self, record: Bytes) -> tuple[Bytes, Bytes, Bytes]:
        """The resident matrices of a record, in copies of their own."""
        gate, up, down = (
            np.empty(p.format.resident_nbytes((p.rows, p.columns)), np.uint8) for p in self.parts
        )
        for index, data in enumerate((gate, up, down)):
            for source, into in self._windows(record, index, data):
                into[...] = source
        return gate, up, down

    def _windows(
        self, record: Bytes, index: int, data: Bytes
    ) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Pairs of views, in record and matrix: whole panels, and rows that fill none."""
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
