from typing import cast

import numpy as np
import pytest

from colibri.checkpoint.record import RecordLayout
from colibri.errors import BudgetError, SettingsError
from colibri.formats import FORMATS
from colibri.kernels.api import Activations
from colibri.lab.bench_matrix import limits_of
from colibri.lab.pairs import Ring
from colibri.lab.working_set import (
    BenchKernels,
    DistinctExperts,
    DistinctMatrices,
    bench_kernels_of,
    read_turn,
    touched,
)
from colibri.settings import Settings

NAMES = ("int4-g64", "int8-g32", "bf16", "f32")


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_distinct_and_of_one_size(name: str) -> None:
    fmt, shape = FORMATS[name], (24, 128)
    memory = np.zeros(100_000, np.uint8)
    made = DistinctMatrices(memory, fmt, shape, rng())
    assert made.count == memory.size // made.stride
    decoded = [fmt.decode(made.matrix(i).data, shape) for i in range(3)]
    assert len({values.tobytes() for values in decoded}) == 3
    np.testing.assert_array_equal(np.roll(decoded[0], -8, 0), decoded[1])
    assert np.std(decoded[0]) == pytest.approx(128**-0.5, rel=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_experts_as_matrices(name: str) -> None:
    """A record read as matrices is the same rows, gate's and up's perhaps in another order."""
    fmt = FORMATS[name]
    layout = RecordLayout.uniform(fmt, 128, 64)
    made = DistinctExperts(np.zeros(10 * layout.nbytes, np.uint8), layout, rng())
    assert made.count == 10
    record = made.memory[3 * made.stride : 4 * made.stride]
    wanted = layout.split(record)
    found = [fmt.decode(m.data, (m.rows, m.columns)) for m in made.matrices(3)]
    gate, up, down = (
        fmt.decode(data, (part.rows, part.columns))
        for data, part in zip(wanted, layout.parts, strict=True)
    )
    np.testing.assert_array_equal(found[2], down)
    rows = {row.tobytes() for row in np.concatenate(found[:2])}
    assert rows == {row.tobytes() for row in np.concatenate([gate, up])}


def test_bare_matmul() -> None:
    kernels = bench_kernels_of(Settings(threads=1), Activations.INT16)
    made = DistinctMatrices(np.zeros(20_000, np.uint8), FORMATS["int4-g64"], (16, 64), rng())
    x = rng().standard_normal((3, 64), np.float32)
    kernels.reserve(limits_of([(16, 64)], 3))
    out = np.zeros((3, 16), np.float32)
    call = kernels.bare_matmul(made.matrix(1), x, out)
    assert not out.any()
    assert call() == 0
    np.testing.assert_array_equal(out, kernels.matmul(made.matrix(1), x))


def test_reading_goes_around() -> None:
    class Kernels:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def read_sum(self, array: np.ndarray) -> int:
            self.sizes.append(array.size)
            return 0

    kernels, ring = Kernels(), Ring(6)
    ring.take(4)
    rate = read_turn(cast(BenchKernels, kernels), np.zeros(60, np.uint8), ring, 10)
    assert kernels.sizes == [20, 10]
    assert rate > 0


def test_the_reference_is_not_measured() -> None:
    with pytest.raises(SettingsError, match="only native kernels are measured"):
        bench_kernels_of(Settings(kernels="reference"), Activations.INT16)


def test_memory_that_is_not_there() -> None:
    with pytest.raises(BudgetError, match="the working set takes"):
        touched(1 << 50, "the working set")
