"""Packing by the library where there is one, else by its twin in `formats.packing`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from colibri.formats import Bytes, Scan
from colibri.formats.packing import Packing
from colibri.formats.scanning import all_finite as all_finite_in_python
from colibri.kernels.library import Library, load, unavailable_reason


def pack(packing: Packing, pieces: Sequence[Bytes], out: Bytes) -> bool:
    """Write the result to the start of `out`; False where a number is not finite or has no code.

    Raises:
        ValueError: a piece is shorter than what is read of it, or `out` than what is written.
    """
    library = _library()
    packing.check(pieces, out)
    if library is None:
        return packing.run(pieces, out)
    rows = np.array(packing.row(), np.int64)
    kept = [library.ffi.from_buffer("uint8_t[]", piece) for piece in pieces]
    pointers = library.ffi.new("uint8_t *[]", kept)
    where = library.ffi.cast("colibri_packing *", library.ffi.from_buffer("int64_t[]", rows))
    return not library.lib.colibri_pack(where, pointers, library.ffi.from_buffer(out))


def all_finite(data: Bytes, scans: Iterable[Scan]) -> bool:
    """Whether what the scans look at in `data` holds neither NaN nor infinity."""
    library = _library()
    if library is None:
        return all(all_finite_in_python(data, scan) for scan in scans)
    return all(
        library.lib.colibri_all_finite(
            library.ffi.from_buffer(data[scan.offset :]),
            *(scan.nbytes, scan.stride, scan.num_runs, scan.kind),
        )
        for scan in scans
        if scan.nbytes and scan.num_runs
    )


@cache
def _library() -> Library | None:
    return None if unavailable_reason() else load()
