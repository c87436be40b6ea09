"""Matrix products over more weights than caches hold, against plain reading and against a peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from colibri.formats import Bytes, Floats, Format, Shape, padded
from colibri.kernels.api import Activations, Limits
from colibri.lab.bench_config import KernelBench
from colibri.lab.bench_result import Measured, Result, no_rounds, peer_fields
from colibri.lab.bootstrap import interval, median
from colibri.lab.inputs import KINDS, gaussian, rms_error
from colibri.lab.pairs import Ring, Turn, alternate, items_for
from colibri.lab.peer import BITS_PER_WEIGHT, PeerLibrary, PeerMatrices
from colibri.lab.working_set import ALIGN, BenchKernels, DistinctMatrices, read_turn

KernelsBy = Mapping[Activations, BenchKernels]

_ERROR_ROWS = 8  # tokens of each kind of input
_PEER_FORMAT = "int4-g64"
_PEER_BYTES = 640_000_000
_PEER_PAUSE_S = 0.005  # both have threads that spin for a moment after their last work


@dataclass(frozen=True, slots=True, eq=False)
class MatrixCell:
    """One shape in one format, filled into memory; measured for every coding and every n."""

    bench: KernelBench
    name: str
    weights: DistinctMatrices
    kernels: KernelsBy
    peer: PeerMatrices | None

    def measure(self) -> Iterator[Measured]:
        """One result for each coding and n."""
        for coding in self.bench.codings(self.weights.format):
            kernels = self.kernels[coding]
            error = matrix_error(kernels, self.weights)
            for n in self.bench.num_tokens:
                yield self._one(kernels, n, error)

    def _one(self, kernels: BenchKernels, n: int, error: float) -> Measured:
        rows, columns = self.weights.shape
        x = gaussian(np.random.default_rng(n), n, columns)
        product = ProductTurns(kernels, self.weights, x, self.bench.turn_s)
        turns: list[Turn] = [product.read, product.multiply]
        if self.peer is not None:
            self.peer.prepare(x, min(product.num, self.peer.count))
            turns.append(self.peer.turn)
        pause = 0.0 if self.peer is None else _PEER_PAUSE_S
        rates = alternate(turns, self.bench.pairs, pause)
        limits, own = rates[:, 0], rates[:, 1]
        shares = own * self.weights.nbytes / limits
        ratios = own / rates[:, 2] if self.peer is not None else no_rounds()
        speed = median(own.tolist())
        result = Result(
            op="matrix",
            shape=self.name,
            format=self.weights.format.name,
            activations=str(kernels.activations),
            n=n,
            rows=rows,
            columns=columns,
            threads=kernels.threads,
            bytes_per_s=speed * self.weights.nbytes,
            share_of_limit=median(shares.tolist()),
            gops=speed * 2 * rows * columns * n / 1e9,
            error_rms=error,
            interval=interval(shares.tolist()),
            **peer_fields(ratios),
        )
        return Measured(result, limits, shares, ratios)


class ProductTurns:
    """Two contenders over one ring of matrices: reading them, and multiplying by them.

    Attributes:
        num: matrices in a turn of `multiply`.
    """

    def __init__(
        self, kernels: BenchKernels, weights: DistinctMatrices, x: Floats, turn_s: float
    ) -> None:
        self._kernels, self._weights = kernels, weights
        self._ring = Ring(weights.count)
        out = np.empty((len(x), weights.shape[0]), np.float32)
        self._calls = [
            kernels.bare_matmul(weights.matrix(index), x, out) for index in range(weights.count)
        ]
        self.num = items_for(turn_s, self._seconds, weights.count)

    def read(self) -> float:
        """Bytes per second."""
        weights = self._weights
        return read_turn(self._kernels, weights.memory, self._ring, weights.stride)

    def multiply(self) -> float:
        """Matrices per second."""
        return self.num / self._seconds(self.num)

    def _seconds(self, num: int) -> float:
        chosen: list[Callable[[], int]] = []
        for begin, end in self._ring.take(num):
            chosen += self._calls[begin:end]
        start = time.perf_counter()
        for call in chosen:
            call()
        return time.perf_counter() - start


def bench_errors(
    bench: KernelBench, memory: Bytes, kernels: KernelsBy, begin: Callable[[], None]
) -> Iterator[Measured]:
    """Errors alone, in the formats whose speed is not measured; `begin` is called before each."""
    for expert, fmt in bench.weights(errors_only=True):
        begin()
        for shape in expert.matrices():
            one = memory[: padded(fmt.resident_nbytes(shape), ALIGN)]
            weights = DistinctMatrices(one, fmt, shape, np.random.default_rng(0))
            for coding in bench.codings(fmt):
                result = Result(
                    op="matrix",
                    shape=expert.name,
                    format=fmt.name,
                    activations=str(coding),
                    n=_ERROR_ROWS,
                    rows=shape[0],
                    columns=shape[1],
                    threads=kernels[coding].threads,
                    error_rms=matrix_error(kernels[coding], weights),
                )
                yield Measured(result)


def matrix_error(kernels: BenchKernels, weights: DistinctMatrices) -> float:
    """The worst of the four kinds of inputs, against float64 over the exact weights."""
    matrix = weights.matrix(0)
    exact = weights.format.decode(matrix.data, weights.shape).astype(np.float64)
    errors = []
    for number, kind in enumerate(KINDS.values()):
        x = kind(np.random.default_rng(number), _ERROR_ROWS, weights.shape[1])
        errors.append(rms_error(kernels.matmul(matrix, x), exact, x))
    return max(errors)


def bench_matrices(
    bench: KernelBench,
    memory: Bytes,
    kernels: KernelsBy,
    library: PeerLibrary | None,
    begin: Callable[[], None],
) -> Iterator[Measured]:
    """Every matrix of every shape in every format; `begin` is called before each."""
    for expert, fmt in bench.weights():
        for shape in expert.matrices():
            begin()
            weights = DistinctMatrices(memory, fmt, shape, np.random.default_rng(0))
            with ExitStack() as stack:
                peer = _peer_of(library, fmt, shape, bench, kernels)
                if peer is not None:
                    stack.enter_context(peer).check()
                yield from MatrixCell(bench, expert.name, weights, kernels, peer).measure()


def _peer_of(
    library: PeerLibrary | None, fmt: Format, shape: Shape, bench: KernelBench, kernels: KernelsBy
) -> PeerMatrices | None:
    if library is None or fmt.name != _PEER_FORMAT:
        return None
    nbytes = min(_PEER_BYTES, bench.working_set_bytes)
    count = max(1, round(nbytes / (shape[0] * shape[1] * BITS_PER_WEIGHT / 8)))
    threads = next(iter(kernels.values())).threads
    return PeerMatrices(library, shape, count, threads)


def limits_of(shapes: Sequence[Shape], rows: int) -> Limits:
    """What `matmul` of `rows` rows and these shapes `[N, K]` needs reserved."""
    widest = max(max(shape) for shape in shapes)
    return Limits(
        rows=max(rows, _ERROR_ROWS),
        hidden_size=widest,
        attention_width=widest,
        intermediate_size=widest,
        num_experts=1,
        num_experts_per_tok=1,
        vocab_size=widest,
    )
