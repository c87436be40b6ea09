"""What a weight format is: a named value that knows its bytes, on disk and in a slot.

A format defines exact real numbers for a matrix `[N, K]` (N output rows, K inputs). `nbytes` is
its size as stored row by row, `resident_nbytes` its size where the kernels read it, and `pack` the
exact way from the first to the second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Shape: TypeAlias = tuple[int, int]

SCAN_F32, SCAN_F16, SCAN_BF16, SCAN_E8M0, SCAN_E4M3 = range(5)  # kinds of `Scan`, as in native code
PANEL_ROWS = 8  # rows that lie together in a coded matrix; threads are handed whole panels


class Scan(NamedTuple):
    """Where bytes of a matrix may hold what is not finite: `num_runs` runs, `stride` apart.

    Attributes:
        offset: of the first run, from the matrix's start.
        nbytes: of one run.
        stride: from run to run.
        num_runs: runs.
        kind: what the bytes are, one of `SCAN_*`.
    """

    offset: int
    nbytes: int
    stride: int
    num_runs: int
    kind: int


class Format(ABC):
    """One way of storing a matrix `[N, K]`; instances are immutable and compared by identity.

    Attributes:
        name: the format's name everywhere: files, flags, plans.
        group: weights along K that share one scale; 0 where there are no scales.
        code: the number of the format in the native ABI.
    """

    name: str
    group: int = 0
    code: int

    @property
    def is_coded(self) -> bool:
        """Whether weights are integers with scales; then activations are coded too."""
        return self.group > 0

    @property
    def is_plain(self) -> bool:
        """Whether a file may hold it as an ordinary tensor of floats; else it is bytes."""
        return False

    @abstractmethod
    def nbytes(self, shape: Shape) -> int:
        """Bytes of `[N, K]` as stored, row by row, padding included."""

    @abstractmethod
    def resident_nbytes(self, shape: Shape) -> int:
        """Bytes of `[N, K]` where the kernels read it."""

    @abstractmethod
    def panel_nbytes(self, columns: int) -> int:
        """Resident bytes of eight rows of `columns` weights."""

    @abstractmethod
    def encode(self, weights: Floats) -> Bytes:
        """Round `[N, K]` float32 to this format; returns stored bytes `[nbytes]`.

        Raises:
            NumericsError: an integer format has no code for a weight: it is not finite, or beyond
                the largest code times the largest float16.
        """

    @abstractmethod
    def pack(self, stored: Bytes, shape: Shape) -> Bytes:
        """Stored bytes `[nbytes]` to resident bytes `[resident_nbytes]`; no number changes."""

    @abstractmethod
    def decode(self, resident: Bytes, shape: Shape) -> Floats:
        """The exact numbers `[N, K]` of resident bytes, as float32."""

    @abstractmethod
    def scans(self, shape: Shape, panel_stride: int) -> list[Scan]:
        """Where resident bytes of `[N, K]` with panels that far apart may not be finite."""

    def __repr__(self) -> str:
        return self.name


def padded(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple of `multiple`."""
    return -(-count // multiple) * multiple
