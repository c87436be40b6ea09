"""ggml's repacked Q4_0 through the driver that benchmarks/README.md builds."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from cffi import FFI

from colibri.errors import RequestError
from colibri.formats import Floats, Shape
from colibri.lab.inputs import gaussian, rms_error

VERSION = 1  # PEER_VERSION of benchmarks/ggml_peer.c
BITS_PER_WEIGHT = 4.5
_MOST_ERROR = 0.03  # rms over rms, inputs coded in 8 bits by groups of 32
_ADVICE = "build the driver as benchmarks/README.md says, and name it with --peer"
_C = """
typedef struct peer peer;
int peer_version(void);
peer *peer_open(int rows, int columns, int count, int threads);
int peer_prepare(peer *p, int n, int each, const float *input);
int peer_run(peer *p, int graph, int each);
void peer_output(peer *p, int graph, float *out);
void peer_weights(peer *p, float *out);
void peer_close(peer *p);
"""


class PeerLibrary:
    """The driver, loaded."""

    def __init__(self, path: Path) -> None:
        """Load it.

        Raises:
            RequestError: it is no such driver, or one of another version.
        """
        self.ffi = FFI()
        self.ffi.cdef(_C)
        try:
            self.lib: Any = self.ffi.dlopen(str(path.resolve()))
            version = self.lib.peer_version()
        except (OSError, AttributeError) as error:
            raise RequestError(f"{path} is no driver of the peer ({error}): {_ADVICE}") from None
        if version != VERSION:
            raise RequestError(f"{path} has version {version}, not {VERSION}: {_ADVICE} again")


class PeerMatrices:
    """Distinct matrices of one shape; use it in a `with`."""

    def __init__(self, library: PeerLibrary, shape: Shape, count: int, threads: int) -> None:
        """Quantise and repack `count` of them.

        Raises:
            RequestError: the peer refuses: no memory, or no repacking on this processor.
        """
        self.shape, self.count = shape, count
        self._ffi, self._lib = library.ffi, library.lib
        self._peer = self._lib.peer_open(*shape, count, threads)
        if not self._peer:
            raise RequestError(
                f"the peer cannot make {count} repacked Q4_0 matrices {list(shape)}: "
                "it lacks memory, or ggml has no repacking for this processor"
            )
        self._each = self._graphs = self._next = 0

    def prepare(self, x: Floats, each: int) -> None:
        """Multiply `x [T, K]` from now on, `each` matrices in a turn."""
        self._each, self._next = each, 0
        given = np.ascontiguousarray(x, np.float32)
        pointer = self._ffi.from_buffer("float[]", given)
        self._graphs = self._lib.peer_prepare(self._peer, len(x), each, pointer)
        if self._graphs < 1:
            raise RequestError(f"the peer cannot multiply {len(x)} rows by matrices {self.shape}")

    def turn(self) -> float:
        """The next matrices, in a circle; matrices per second."""
        graph, self._next = self._next, (self._next + 1) % self._graphs
        start = time.perf_counter()
        done = self._lib.peer_run(self._peer, graph, self._each)
        seconds = time.perf_counter() - start
        if done < 1:
            raise RequestError("the peer failed to compute")
        return float(done / seconds)

    def check(self) -> None:
        """See that it multiplies what we think, to the few percent that its coding costs.

        Raises:
            RequestError: it computes something else.
        """
        x = gaussian(np.random.default_rng(0), 2, self.shape[1])
        self.prepare(x, 1)
        self._lib.peer_run(self._peer, 0, 1)
        found = np.empty((len(x), self.shape[0]), np.float32)
        weights = np.empty(self.shape, np.float32)
        self._lib.peer_output(self._peer, 0, self._ffi.from_buffer("float[]", found))
        self._lib.peer_weights(self._peer, self._ffi.from_buffer("float[]", weights))
        error = rms_error(found, weights.astype(np.float64), x)
        if not error <= _MOST_ERROR:
            raise RequestError(f"the peer's products are off by {error:.0%}: {_ADVICE}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lib.peer_close(self._peer)
