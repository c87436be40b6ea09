"""Row operations: against the reference, the same bits everywhere, slices of wider arrays."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import FORMATS, Floats
from colibri.kernels.recurrent_api import Activation, DecayGate, GroupNorm, Projections
from tests.examples import examples
from tests.kernels.builders import (
    ERROR,
    REFERENCE,
    assert_close,
    assert_same_bits,
    gaussian,
    generator,
    matrix,
    native,
    norm,
    variants,
)

SEEDS = st.integers(0, 2**32 - 1)


def within(rng: np.random.Generator, rows: int, width: int) -> Floats:
    """Rows that are a range of columns of something wider."""
    wide = gaussian(rng, rows, width + 5)
    return wide[:, 2 : 2 + width]


@settings(max_examples=examples(40))
@given(
    groups=st.integers(1, 5),
    width=st.integers(1, 70),
    rows=st.integers(1, 9),
    of_sum=st.booleans(),
    weighted=st.booleans(),
    gate=st.sampled_from([None, "sigmoid", "silu"]),
    seed=SEEDS,
)
def test_norm_rows(
    groups: int, width: int, rows: int, of_sum: bool, weighted: bool, gate: Any, seed: int
) -> None:
    rng = generator(seed)
    weight = gaussian(rng, width) if weighted else None
    layer = GroupNorm(width, 1e-6, weight, of_sum, gate)
    x = within(rng, rows, groups * width)
    z = None if gate is None else within(rng, rows, groups * width)
    wanted, found = REFERENCE.norm_rows(layer, x, z), native().norm_rows(layer, x, z)
    assert_close(found, wanted, 2e-6)
    for kernels in variants("int16"):
        assert_same_bits(kernels.norm_rows(layer, x, z), found)
    for t in range(rows):
        alone = native().norm_rows(layer, x[t : t + 1], None if z is None else z[t : t + 1])
        assert_same_bits(alone[0], found[t])


ACTIVATIONS: list[Activation] = ["sigmoid", "silu", "softplus", "exp"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_accurate(name: Activation) -> None:
    """Within a few units in the last place of float64, far from zero and near it."""
    x = np.concatenate([np.linspace(-80, 80, 40_001), np.linspace(-1, 1, 40_001)])
    wide = x.astype(np.float32).astype(np.float64)
    exact = {
        "sigmoid": lambda: 1 / (1 + np.exp(-wide)),
        "silu": lambda: wide / (1 + np.exp(-wide)),
        "softplus": lambda: np.logaddexp(0, wide),
        "exp": lambda: np.exp(wide),
    }[name]()
    found = native().activate(name, x.astype(np.float32)[None])[0]
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(found - exact) / ulp).max() <= 4


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_at_the_edges_and_everywhere(name: Activation) -> None:
    x = np.array([[-np.inf, -200.0, -0.0, 0.0, 200.0, np.inf, np.nan]], np.float32)
    with np.errstate(all="ignore"):
        wanted = REFERENCE.activate(name, x)
    found = native().activate(name, x)
    finite = np.isfinite(wanted)
    np.testing.assert_allclose(found[finite], wanted[finite], rtol=1e-6)
    assert np.isnan(found[0, -1])
    many = gaussian(generator(3), 7, 1001) * np.float32(20)
    for kernels in variants("int16"):
        assert_same_bits(kernels.activate(name, x)[:, :-1], found[:, :-1])
        assert_same_bits(kernels.activate(name, many), native().activate(name, many))


@settings(max_examples=examples(30))
@given(
    heads=st.integers(1, 9),
    width=st.integers(1, 40),
    rows=st.integers(1, 6),
    bound=st.sampled_from([None, -5.0]),
    seed=SEEDS,
)
def test_decay(heads: int, width: int, rows: int, bound: float | None, seed: int) -> None:
    rng = generator(seed)
    gate = DecayGate(gaussian(rng, heads + 2), gaussian(rng, heads * width), heads, bound)
    a = within(rng, rows, heads * width)
    wanted, found = REFERENCE.decay(gate, a), native().decay(gate, a)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-30)
    assert ((found >= 0) & (found <= 1)).all()
    for kernels in variants("int16"):
        assert_same_bits(kernels.decay(gate, a), found)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", ["f32", "bf16", "int4-g64", "int8-g32"])
def test_project(name: str, normed: bool) -> None:
    """More matrices than one loop takes, of several formats; each as if it were alone."""
    rng = generator(4)
    formats = [FORMATS[name], FORMATS["f32"], FORMATS["int8-g64"]] * 4
    layer = Projections(
        tuple(matrix(rng, fmt, 5 + 9 * i, 130, bias=i == 2) for i, fmt in enumerate(formats)),
        norm(rng, 130) if normed else None,
    )
    for activations in ("float32", "int16"):
        kernels = native(activations)
        x = gaussian(rng, 17, 130)
        found = kernels.project(layer, x)
        for one, wanted in zip(found, REFERENCE.project(layer, x), strict=True):
            assert_close(one, wanted, ERROR[activations])
        for other in variants(activations):
            for one, again in zip(found, other.project(layer, x), strict=True):
                assert_same_bits(again, one)
        for t in (0, 16):
            for one, alone in zip(found, kernels.project(layer, x[t : t + 1]), strict=True):
                assert_same_bits(alone[0], one[t])


def test_a_projection_without_a_norm_is_a_product() -> None:
    rng = generator(5)
    m, x = matrix(rng, FORMATS["int4-g64"], 33, 130), gaussian(rng, 3, 130)
    assert_same_bits(native().project(Projections((m,)), x)[0], native().matmul(m, x))


def test_what_does_not_fit_is_refused() -> None:
    rng, kernels = generator(6), native()
    x = gaussian(rng, 2, 12)
    with pytest.raises(ValueError, match="groups of 5"):
        kernels.norm_rows(GroupNorm(5, 1e-6), x)
    with pytest.raises(ValueError, match="no gate is given"):
        kernels.norm_rows(GroupNorm(4, 1e-6, gate="silu"), x)
    with pytest.raises(ValueError, match="gated by silu"):
        REFERENCE.norm_rows(GroupNorm(4, 1e-6, gate="silu"), x)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.activate("exp", x[:, ::2])
    with pytest.raises(ValueError, match="float32 rows"):
        kernels.activate("exp", x.astype(np.float64))
    with pytest.raises(ValueError, match="must be negative"):
        kernels.decay(DecayGate(x[0], x[0], 12, 1.0), x)
    with pytest.raises(ValueError, match="5 heads"):
        kernels.decay(DecayGate(x[0], x[0], 5), x)
    two = Projections((matrix(rng, FORMATS["f32"], 3, 12), matrix(rng, FORMATS["f32"], 3, 13)))
    with pytest.raises(ValueError, match="same number of columns"):
        kernels.project(two, x)
