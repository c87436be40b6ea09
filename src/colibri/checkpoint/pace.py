"""How long a conversion will take here, by a short measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from colibri.checkpoint.conversion import Conversion
from colibri.checkpoint.recode import recode
from colibri.formats import BF16, get_format
from colibri.kernels.cpus import num_threads

_SAMPLE = (256, 2048)  # of a matrix
_SAMPLE_FORMAT = "int4-g64"
_READ_BYTES = 32 << 20


def estimate_s(conversion: Conversion) -> float:
    """Seconds that it will take: what is slower of coding on all CPUs, and reading and writing.

    Writing is taken to be as fast as reading; neither the page cache nor other programs are known.
    """
    coding = conversion.num_weights / (_weights_per_s() * num_threads())
    files = conversion.files
    if not files:
        return coding
    rate = _bytes_per_s(max(files, key=lambda path: path.stat().st_size))
    return max(coding, conversion.source_bytes / rate, conversion.total_bytes / rate)


def _weights_per_s() -> float:
    """Of one thread that rounds."""
    values = np.random.default_rng(0).standard_normal(_SAMPLE, np.float32)
    data = BF16.from_float32(values).reshape(-1).view(np.uint8)
    began = time.perf_counter()
    recode(data, BF16, get_format(_SAMPLE_FORMAT), _SAMPLE, "a sample")
    return values.size / max(time.perf_counter() - began, 1e-6)


def _bytes_per_s(path: Path) -> float:
    """Of reading the middle of a file, which the page cache is asked to forget first."""
    size = path.stat().st_size
    start, nbytes = max(0, size - _READ_BYTES) // 2, min(size, _READ_BYTES)
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), start, nbytes, os.POSIX_FADV_DONTNEED)
        file.seek(start)
        began = time.perf_counter()
        got = len(file.read(nbytes))
    return max(got, 1) / max(time.perf_counter() - began, 1e-6)
