"""Looks for NaN and infinity in bytes, as a `Scan` says."""

from __future__ import annotations

import numpy as np

from colibri.formats.base import (
    SCAN_BF16,
    SCAN_E4M3,
    SCAN_E8M0,
    SCAN_F16,
    SCAN_F32,
    Bytes,
    Scan,
)

# What an item that is not finite has set, by kind of scan.
_NOT_FINITE = {
    SCAN_F32: ("<u4", 0x7F800000),
    SCAN_F16: ("<u2", 0x7C00),
    SCAN_BF16: ("<u2", 0x7F80),
    SCAN_E8M0: ("u1", 0xFF),
    SCAN_E4M3: ("u1", 0x7F),
}


def all_finite(data: Bytes, scan: Scan) -> bool:
    """Whether the runs of a scan hold neither NaN nor infinity."""
    dtype, bits = _NOT_FINITE[scan.kind]
    for run in range(scan.num_runs):
        start = scan.offset + run * scan.stride
        items = np.frombuffer(data[start : start + scan.nbytes], dtype)
        if ((items & bits) == bits).any():
            return False
    return True
