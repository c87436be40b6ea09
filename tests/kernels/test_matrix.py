"""Matrices of every format: numbers, bits, and errors of coded activations."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import F16, F32, FORMATS, Floats
from colibri.kernels.api import FFN, Activations, Head, Limits, Matrix
from colibri.kernels.native import NativeKernels
from tests.examples import examples
from tests.kernels.builders import (
    CODED_NAMES,
    ERROR,
    FORMAT_NAMES,
    REFERENCE,
    TOKENS,
    assert_close,
    assert_same_bits,
    coded,
    gaussian,
    generator,
    glu,
    matrix,
    native,
    norm,
    variants,
)

CASES = {
    "fmt": st.sampled_from(FORMAT_NAMES).map(FORMATS.__getitem__),
    "activations": st.sampled_from(list(ERROR)),
    "rows": st.integers(1, 41),
    "columns": st.integers(1, 300),
    "tokens": st.sampled_from(TOKENS),
    "bias": st.booleans(),
    "shift": st.integers(0, 3),
    "seed": st.integers(0, 2**32 - 1),
}


@settings(max_examples=examples(300), deadline=None)
@given(**CASES)
def test_matmul(
    fmt: Any,
    activations: str,
    rows: int,
    columns: int,
    tokens: int,
    bias: bool,
    shift: int,
    seed: int,
) -> None:
    rng = generator(seed)
    m = matrix(rng, fmt, rows, columns, bias, shift)
    x = gaussian(rng, tokens, columns)
    found = native(activations).matmul(m, x)
    wanted = REFERENCE.matmul(m, x)
    # A single row may cancel to almost nothing, so the error is one of the terms it is a sum of;
    # a coded input is off by a part of the largest in its group.
    sizes = np.abs(fmt.decode(m.data, (rows, columns)))
    coded_inputs = fmt.is_coded and activations != "float32"
    most = np.broadcast_to(np.abs(x).max(axis=1, keepdims=True), x.shape)
    scale = (most if coded_inputs else np.abs(x)) @ sizes.T
    error = {"int16": 3e-5, "int8": 6e-3}[activations] if coded_inputs else 4e-6
    assert (np.abs(found - wanted) <= error * (scale + np.abs(wanted))).all()
    for kernels in variants(activations):
        assert_same_bits(kernels.matmul(m, x), found)
    for t in range(tokens):
        assert_same_bits(native(activations).matmul(m, x[t : t + 1]), found[t : t + 1])


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_embed(name: str) -> None:
    m = matrix(generator(1), FORMATS[name], 19, 77)
    ids = np.array([18, 0, 7, 8, 0], np.int32)
    for kernels in variants("int16"):
        assert_same_bits(kernels.embed(m, ids), REFERENCE.embed(m, ids))


@pytest.mark.parametrize("bad", [-1, 19])
def test_an_id_outside_the_vocabulary_is_refused(bad: int) -> None:
    m = matrix(generator(1), F32, 19, 8)
    with pytest.raises(ValueError, match=r"out of range \(at 1\)"):
        native().embed(m, np.array([0, bad], np.int32))


def inputs(kind: str, tokens: int, columns: int) -> Floats:
    rng = generator(7)
    x = gaussian(rng, tokens, columns)
    if kind == "outliers":
        x[rng.random(x.shape) < 0.01] *= 8
    elif kind == "swiglu":
        gate = gaussian(rng, tokens, columns)
        x = (x * gate / (1 + np.exp(-gate))).astype(np.float32)
    elif kind == "channel":
        x[:, columns // 2] *= 1000
    return x


@pytest.mark.parametrize("kind", ["gaussian", "outliers", "swiglu", "channel"])
@pytest.mark.parametrize("name", CODED_NAMES)
def test_the_error_of_int16_activations(name: str, kind: str) -> None:
    m = matrix(generator(3), FORMATS[name], 64, 256)
    x = inputs(kind, 16, 256)
    exact = x.astype(np.float64) @ m.format.decode(m.data, (64, 256)).astype(np.float64).T
    error = np.sqrt(
        np.square(native("int16").matmul(m, x) - exact).mean() / np.square(exact).mean()
    )
    assert error <= (1.5e-4 if m.format.group == 128 else 1e-4)


@pytest.mark.parametrize("activations", list(ERROR))
@pytest.mark.parametrize("name", ["f32", "bf16", "int8-g32", "int4-g64"])
def test_an_input_that_is_not_finite_shows(name: str, activations: str) -> None:
    m = matrix(generator(4), FORMATS[name], 9, 80)
    x = gaussian(generator(5), 3, 80)
    x[1, 70] = np.nan
    x[2, 3] = np.inf
    found = native(activations).matmul(m, x)
    assert np.isfinite(found[0]).all()
    assert not np.isfinite(found[1:]).any()


@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_tiny_and_zero_inputs(activations: str) -> None:
    m = matrix(generator(4), FORMATS["int4-g64"], 9, 128)
    x = np.zeros((2, 128), np.float32)
    x[1] = 1e-38
    assert (native(activations).matmul(m, x) == 0).all()


def test_every_float16_is_exact() -> None:
    values = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = values[np.isfinite(values)]
    m = Matrix(F16, finite.size, 1, coded(F16, finite[:, None]))
    for kernels in variants("int16"):
        assert (kernels.matmul(m, np.ones((1, 1), np.float32))[0] == finite).all()


@pytest.mark.parametrize("activations", list(ERROR))
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(("tokens", "hidden", "units"), [(1, 64, 128), (5, 77, 52), (33, 40, 200)])
def test_ffn_step(name: str, activations: str, tokens: int, hidden: int, units: int) -> None:
    rng = generator(tokens)
    layer: FFN = glu(rng, FORMATS[name], hidden, units, normed=True)
    x = gaussian(rng, tokens, hidden)
    wanted, found = x.copy(), x.copy()
    REFERENCE.ffn_step(layer, wanted)
    native(activations).ffn_step(layer, found)
    assert_close(found, wanted, ERROR[activations] if layer.gate_proj.format.is_coded else 4e-6)
    for kernels in variants(activations):
        again = x.copy()
        kernels.ffn_step(layer, again)
        assert_same_bits(again, found)
    for t in range(tokens):
        row = x[t : t + 1].copy()
        native(activations).ffn_step(layer, row)
        assert_same_bits(row, found[t : t + 1])


@pytest.mark.parametrize("name", ["f32", "int8-g64"])
def test_head_step(name: str) -> None:
    rng = generator(2)
    head = Head(norm(rng, 96), matrix(rng, FORMATS[name], 131, 96))
    x = gaussian(rng, 3, 96)
    found = native().head_step(head, x)
    assert_close(found, REFERENCE.head_step(head, x), ERROR["int16"])
    for kernels in variants("int16"):
        assert_same_bits(kernels.head_step(head, x), found)


def test_a_step_beyond_the_reserved_workspace_is_refused() -> None:
    kernels = NativeKernels(threads=1, activations=Activations.INT16)
    limits = Limits(2, 64, 64, 64, 4, 2, 64)
    m = matrix(generator(1), FORMATS["int4-g64"], 64, 64)
    with pytest.raises(ValueError, match="needs more than the 0 bytes reserved"):
        kernels.matmul(m, np.zeros((2, 64), np.float32))
    kernels.reserve(limits)
    assert kernels.matmul(m, np.zeros((2, 64), np.float32)).shape == (2, 64)
    with pytest.raises(ValueError, match="reserved"):
        kernels.ffn_step(glu(generator(1), F32, 64, 64, True), np.zeros((200, 64), np.float32))


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 65), np.float32),
        np.zeros((2, 64), np.float64),
        np.zeros((64, 2), np.float32).T,
        np.zeros(64, np.float32),
    ],
)
def test_wrong_arrays_are_refused(x: Any) -> None:
    m = matrix(generator(1), F32, 8, 64)
    with pytest.raises(ValueError, match="x must be a contiguous float32 array"):
        native().matmul(m, x)


def test_a_matrix_that_is_too_short_is_refused() -> None:
    m = matrix(generator(1), F32, 8, 64)
    short = Matrix(F32, 8, 64, m.data[:-1])
    with pytest.raises(ValueError, match="takes 2048 bytes, not 2047"):
        native().matmul(short, np.zeros((1, 64), np.float32))


@pytest.mark.parametrize("name", ["fp8-e4m3-b128", "fp8-e4m3-b32"])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (8, 149), (11, 130)])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_of_fp8_spoils_its_row(name: str, row: int, column: int, code: int) -> None:
    m = matrix(generator(4), FORMATS[name], 12, 150, shift=0)
    m.data[row * 150 + column] = code
    x = gaussian(generator(5), 5, 150)
    for kernels in variants("int16"):
        found = kernels.matmul(m, x)
        assert np.isnan(found[:, row]).all()
        assert np.isfinite(np.delete(found, row, axis=1)).all()
        assert np.isnan(kernels.embed(m, np.array([row], np.int32))[0, column])


def test_every_fp8_code_is_exact() -> None:
    fmt = FORMATS["fp8-e4m3-b32"]
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    data = np.concatenate([codes, np.zeros(2, np.uint8), np.ones(8, np.float32).view(np.uint8)])
    m = Matrix(fmt, codes.size, 1, data)
    for kernels in variants("int16"):
        found = kernels.matmul(m, np.ones((1, 1), np.float32))
        np.testing.assert_array_equal(found[0], fmt.decode(data, (codes.size, 1))[:, 0])


@pytest.mark.parametrize("name", [name for name in FORMAT_NAMES if name.startswith("fp8")])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_fp8_codes_that_are_subnormal_or_zero(name: str, share: float) -> None:
    """Any share of them: long runs of other codes are read another way."""
    rng, shape = generator(6), (13, 340)
    codes = rng.integers(8, 127, shape, np.uint8)
    small = rng.random(shape) < share
    codes[small] = rng.integers(0, 8, shape, np.uint8)[small]
    m = matrix(rng, FORMATS[name], *shape)
    m.data[: codes.size] = (codes | rng.integers(0, 2, shape, np.uint8) << 7).reshape(-1)
    x = gaussian(rng, 5, shape[1])
    found = native().matmul(m, x)
    sizes = np.abs(m.format.decode(m.data, shape))
    assert (np.abs(found - REFERENCE.matmul(m, x)) <= 4e-6 * (np.abs(x) @ sizes.T)).all()
    for kernels in variants("int16"):
        assert_same_bits(kernels.matmul(m, x), found)


@pytest.mark.parametrize("activations", list(ERROR))
def test_the_scales_of_mxfp4_at_the_edges(activations: str) -> None:
    """Scale bytes 0 (2^-127), 1, 250 and 255 (NaN), each of one row, as the reference has them."""
    m = matrix(generator(4), FORMATS["mxfp4"], 8, 32, shift=0)
    m.data[:8] = [0, 1, 127, 240, 255, 127, 127, 127]
    x = gaussian(generator(5), 2, 32)
    wanted, found = REFERENCE.matmul(m, x), native(activations).matmul(m, x)
    assert np.isnan(found[:, 4]).all()
    keep = [0, 1, 2, 3, 5, 6, 7]
    largest = np.abs(wanted[:, keep]).max(axis=0)
    assert (np.abs(found - wanted)[:, keep] <= 4 * ERROR[activations] * largest).all()
    for kernels in variants(activations):
        assert_same_bits(kernels.matmul(m, x), found)
