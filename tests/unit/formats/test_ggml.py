"""Block types of GGUF files have the numbers that the `gguf` package gives them, bit for bit."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import FORMATS, Q4_K, Q6_K, SuperBlockFormat
from colibri.formats.ggml import BLOCK_TYPES, BY_DTYPE, BY_NUMBER, BlockType
from tests.blocks import HALVES, random_blocks
from tests.examples import examples

each_type = pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)


def reference(rows: np.ndarray, number: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(number))


@each_type
@settings(max_examples=examples(10), deadline=None)
@given(st.integers(1, 11), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_numbers_are_exact(kind: BlockType, rows: int, blocks: int, seed: int) -> None:
    shape = (rows, blocks * kind.block)
    data = random_blocks(np.random.default_rng(seed), kind, shape)
    found = kind.decode(data, shape)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, reference(data, kind.number))


@each_type
def test_every_finite_scale_is_exact(kind: BlockType) -> None:
    """Codes are random, each float16 number of a block takes every finite value."""
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)]
    rows = -(-values.size // 8)
    data = random_blocks(np.random.default_rng(1), kind, (rows, 8 * kind.block))
    blocks = data.reshape(-1, kind.nbytes)
    if kind.name == "mxfp4":
        blocks[:, 0] = np.arange(len(blocks)) % 255  # 255 is NaN here, and refused
    for shift, place in enumerate(HALVES[kind.name]):
        scales = np.resize(np.roll(values, shift * 1001), len(blocks))
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    shape = (rows, 8 * kind.block)
    np.testing.assert_array_equal(kind.decode(data, shape), reference(data, kind.number))


@each_type
def test_sizes_are_those_of_the_reference(kind: BlockType) -> None:
    number = gguf.GGMLQuantizationType(kind.number)
    assert number.name.lower() == kind.name
    assert gguf.GGML_QUANT_SIZES[number] == (kind.block, kind.nbytes)
    assert kind.format in FORMATS.values()
    assert BY_NUMBER[kind.number] is BY_DTYPE[kind.dtype] is kind


@pytest.mark.parametrize("fmt", [Q4_K, Q6_K], ids=str)
@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 20), st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_what_is_encoded_are_blocks(
    fmt: SuperBlockFormat, rows: int, columns: int, seed: int
) -> None:
    weights = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    stored = fmt.encode(weights)
    assert stored.size == fmt.nbytes(weights.shape)
    resident = fmt.pack(stored, weights.shape)
    assert resident.size == fmt.resident_nbytes(weights.shape)
    found = fmt.decode(resident, weights.shape)
    blocks = stored.reshape(-(-rows // 8) * 8, -1)
    wanted = reference(blocks, gguf.GGMLQuantizationType[fmt.name.upper()])
    np.testing.assert_array_equal(found, wanted[:rows, :columns])
    step = {"q4_k": 0.3, "q6_k": 0.1}[fmt.name]  # some half of a code's distance
    assert np.abs(found - weights).max() <= step * max(1.0, np.abs(weights).max() / 4)
    assert not wanted[rows:].any()
