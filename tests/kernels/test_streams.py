"""Residual streams: against the reference and plain sums, the same bits in any chunks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import F32, Floats
from colibri.kernels.api import Kernels
from colibri.kernels.streams import StreamMix, stream_weights
from tests.examples import examples
from tests.kernels.builders import (
    REFERENCE,
    assert_close,
    assert_same_bits,
    gaussian,
    generator,
    matrix,
    native,
    variants,
)


def mix_of(rng: np.random.Generator, num: int, width: int, *, reads_only: bool) -> StreamMix:
    rows, scales = (num, 1) if reads_only else (stream_weights(num), 3)
    return StreamMix(
        fn=matrix(rng, F32, rows, num * width),
        base=gaussian(rng, rows),
        scale=gaussian(rng, scales),
        num_streams=num,
        norm_eps=1e-6,
        eps=1e-6,
        iterations=20,
    )


def through(kernels: Kernels, mix: StreamMix, x: Floats, y: Floats, chunk: int) -> list[Floats]:
    """What is read, the weights, and the streams after y was written, in chunks of rows."""
    streams, found, weights = x.copy(), [], []
    for start in range(0, len(x), chunk):
        part = streams[start : start + chunk]
        read, weighed = kernels.read_streams(mix, part)
        found.append(read)
        weights.append(weighed)
        if not mix.reads_only:
            kernels.write_streams(mix, weighed, y[start : start + chunk], part)
    return [np.concatenate(found), np.concatenate(weights), streams]


@settings(max_examples=examples(15))
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 70), st.booleans())
def test_any_shape(seed: int, num: int, width: int, reads_only: bool) -> None:
    rng, rows = generator(seed), 5
    mix = mix_of(rng, num, width, reads_only=reads_only)
    x, y = gaussian(rng, rows, num * width), gaussian(rng, rows, width)
    wanted = through(REFERENCE, mix, x, y, rows)
    found = through(native(), mix, x, y, rows)
    for native_one, reference_one in zip(found, wanted, strict=True):
        assert_close(native_one, reference_one, 2e-5)
    for chunk in (1, 2):
        for kernels in variants("int16"):
            for again, first in zip(through(kernels, mix, x, y, chunk), found, strict=True):
                assert_same_bits(again, first)


@pytest.mark.parametrize("kernels", [REFERENCE, native()], ids=lambda k: k.name)
def test_the_mixing_matrix_is_doubly_stochastic(kernels: Kernels) -> None:
    rng = generator(3)
    mix = mix_of(rng, 4, 1500, reads_only=False)  # more than one chunk of columns
    x, y = gaussian(rng, 3, 6000), gaussian(rng, 3, 1500)
    read, weights = kernels.read_streams(mix, x)
    mixing = weights[:, 8:].reshape(3, 4, 4)
    np.testing.assert_allclose(mixing.sum(axis=1), 1, atol=1e-4)
    np.testing.assert_allclose(mixing.sum(axis=2), 1, atol=1e-4)
    assert ((weights[:, :4] > 0) & (weights[:, :4] < 1.1)).all()
    assert ((weights[:, 4:8] > 0) & (weights[:, 4:8] < 2)).all()
    streams = x.reshape(3, 4, 1500)
    np.testing.assert_allclose(read, (weights[:, :4, None] * streams).sum(axis=1), atol=1e-5)
    wanted = weights[:, 4:8, None] * y[:, None] + np.einsum("tij,tid->tjd", mixing, streams)
    written = x.copy()
    kernels.write_streams(mix, weights, y, written)
    np.testing.assert_allclose(written.reshape(3, 4, 1500), wanted, atol=1e-5)


def test_other_shapes_are_refused() -> None:
    rng = generator(1)
    good = mix_of(rng, 4, 8, reads_only=False)
    x = gaussian(rng, 2, 32)
    with pytest.raises(ValueError, match="x must be"):
        native().read_streams(good, x[:, :24].copy())
    odd = StreamMix(good.fn, good.base, good.scale, 3, 1e-6, 1e-6, 20)
    with pytest.raises(ValueError, match="streams cannot be mixed"):
        native().read_streams(odd, x)
    read, weights = native().read_streams(good, x)
    with pytest.raises(ValueError, match="y must be"):
        native().write_streams(good, weights, read[:, :4].copy(), x)
