"""Native packing has the bits of its twin, and both those of the formats."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import BF16, F16, FORMATS, Bytes, Format, FP8Format, IntegerFormat, padded
from colibri.formats.ggml import BLOCK_TYPES, BlockType
from colibri.formats.microscaling import power_of_two
from colibri.formats.packing import (
    ITEM_BF16,
    ITEM_BLOCK,
    ITEM_E4M3,
    ITEM_E8M0,
    ITEM_F16,
    ITEM_F32,
    ITEM_NIBBLE,
    Items,
    Packing,
    PackKind,
    item_nbytes,
)
from colibri.kernels import packing as native
from tests.blocks import random_blocks
from tests.examples import examples

shapes = st.tuples(st.integers(1, 30), st.integers(1, 150))
seeds = st.integers(0, 2**32 - 1)
FLOATS = (ITEM_F32, ITEM_F16, ITEM_BF16)
INTEGERS = [f for f in FORMATS.values() if isinstance(f, IntegerFormat) and f.scale is F16]
PANELS = [f for f in FORMATS.values() if f.name.startswith("int4") or f.name == "mxfp4"]


def both(packing: Packing, pieces: list[Bytes], size: int) -> tuple[Bytes, bool]:
    """The result of both, which must be the same."""
    packing.check(pieces, np.empty(size, np.uint8))
    found, wanted = np.full(size, 0xAA, np.uint8), np.full(size, 0xAA, np.uint8)
    finite = native.pack(packing, pieces, found)
    assert finite == packing.run(pieces, wanted)
    if finite:
        assert found.tobytes() == wanted.tobytes()
    return found, finite


def stored(values: np.ndarray, kind: int) -> np.ndarray:
    """Float32 values as items of a kind."""
    return {ITEM_F32: values, ITEM_F16: values.astype("<f2"), ITEM_BF16: BF16.from_float32(values)}[
        kind
    ]


def widened(items: np.ndarray, kind: int) -> np.ndarray:
    return BF16.to_float32(items) if kind == ITEM_BF16 else items.astype(np.float32)


def laid_out(
    items: np.ndarray, how: str, extra: int, rng: np.random.Generator
) -> tuple[Bytes, Items]:
    """Items `[N, K]` in a piece of bytes: row by row, between other rows, or transposed."""
    size, (rows, columns) = items.itemsize, items.shape
    other = rng.permutation(items.reshape(-1)).reshape(items.shape)
    if how == "transposed":
        both = np.stack([items.T, other.T], axis=2)  # [K, N, 2]
        piece, steps = both, (2 * size, 2 * size * rows)
    elif how == "interleaved":
        piece, steps = np.stack([items, other], axis=1), (2 * columns * size, size)
    else:
        piece, steps = items, (columns * size, size)
    data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    whole = np.concatenate([rng.integers(0, 255, extra, np.uint8), data])
    return whole, Items(0, 0, extra, *steps)


hows = st.sampled_from(["rows", "interleaved", "transposed"])


@given(shapes, st.sampled_from([*FLOATS, ITEM_E4M3]), hows, st.integers(0, 5), seeds)
def test_items_are_moved(
    shape: tuple[int, int], kind: int, how: str, extra: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape, item_nbytes(kind)), np.uint8)
    items = raw.view(f"u{item_nbytes(kind)}")[..., 0]
    piece, where = laid_out(items, how, extra, rng)
    packing = Packing(PackKind.MOVE, 0, False, 0, *shape, where._replace(kind=kind))
    found, _ = both(packing, [piece], items.nbytes)
    assert found.tobytes() == items.tobytes()


@given(
    shapes,
    st.sampled_from([*FLOATS, ITEM_E8M0]),
    st.sampled_from([(1, 1), (2, 1), (4, 8), (8, 2)]),
    st.booleans(),
    seeds,
)
def test_items_are_widened_and_repeated(
    shape: tuple[int, int], kind: int, block: tuple[int, int], bad: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    blocks = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if kind == ITEM_E8M0:
        items = rng.integers(0, 255, blocks, np.uint8)
        values = power_of_two(items)
    else:
        items = stored(rng.standard_normal(blocks, np.float32), kind)
        values = widened(items, kind)
    if bad:
        items[-1, -1] = 255 if kind == ITEM_E8M0 else stored(np.float32([np.nan]), kind)[0]
    piece, where = laid_out(items, "rows", 0, rng)
    where = where._replace(kind=kind)
    packing = Packing(PackKind.FLOATS, 0, False, 0, *shape, where, block=block)
    found, finite = both(packing, [piece], 4 * shape[0] * shape[1])
    assert finite != bad
    if not bad:
        wide = np.repeat(np.repeat(values, block[0], 0), block[1], 1)[: shape[0], : shape[1]]
        assert np.array_equal(found.view(np.float32).reshape(shape), wide)


@pytest.mark.parametrize("fmt", PANELS, ids=str)
@settings(max_examples=examples(25))
@given(
    st.integers(1, 30),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([0, 64]),
    st.data(),
    seeds,
)
def test_nibbles_become_panels(
    fmt: Format, rows: int, eights: int, interleaved: bool, gap: int, data: st.DataObject, seed: int
) -> None:
    """Whole words of eight columns, whose last group may be short."""
    rng, columns = np.random.default_rng(seed), 8 * eights
    codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    groups = -(-columns // fmt.group)
    width = 1 if fmt.name == "mxfp4" else 2
    scales = rng.integers(0, 256, (rows, groups * width), np.uint8)
    kind = ITEM_E8M0 if width == 1 else ITEM_BF16 if fmt.name.endswith("bf16") else ITEM_F16
    how = "interleaved" if interleaved else "rows"
    piece, where = laid_out(codes, how, 3, rng)
    scale_piece, scale_where = laid_out(scales.view(f"u{width}"), how, 1, rng)
    stride = fmt.panel_nbytes(columns) + gap
    zero = 0 if width == 1 else 0x88
    packing = Packing(
        PackKind.PANELS,
        *(0, False, 0, rows, columns),
        where._replace(kind=ITEM_NIBBLE),
        scale_where._replace(piece=1, kind=kind),
        bits=4,
        group=fmt.group,
        zero=zero,
        panel_stride=stride,
    )
    panels = -(-rows // 8)
    found, _ = both(packing, [piece, scale_piece], panels * stride)
    lanes = found.reshape(panels, stride)
    assert (lanes[:, stride - gap :] == 0xAA).all()
    full = np.full((padded(rows, 8), padded(columns, fmt.group) // 2), zero, np.uint8)
    full[:rows, : columns // 2] = codes
    all_scales = np.zeros((padded(rows, 8), groups * width), np.uint8)
    all_scales[:rows] = scales
    plain = np.concatenate([full.reshape(-1), all_scales.reshape(-1)])
    wanted = fmt.pack(plain, (rows, columns)).reshape(panels, -1)
    assert lanes[:, : stride - gap].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("fmt", INTEGERS, ids=str)
@settings(max_examples=examples(25))
@given(shapes, st.sampled_from(FLOATS), hows, st.floats(-6, 4), st.booleans(), seeds)
def test_floats_are_rounded_as_the_format_rounds(
    fmt: IntegerFormat,
    shape: tuple[int, int],
    kind: int,
    how: str,
    size: float,
    weighed: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(shape) * 10**size).astype(np.float32)
    values[rng.random(shape) < 0.1] = 0
    items = stored(values, kind)
    piece, where = laid_out(items, how, 0, rng)
    packing = Packing(
        PackKind.ENCODE,
        *(0, False, 0, *shape),
        where._replace(kind=kind),
        bits=fmt.bits,
        group=fmt.group,
        panel_stride=fmt.panel_nbytes(shape[1]),
        importance=1 if weighed else -1,
    )
    importance = np.square(rng.standard_normal(shape[1], np.float32)) if weighed else None
    pieces = [piece] if importance is None else [piece, importance.view(np.uint8)]
    found, finite = both(packing, pieces, fmt.resident_nbytes(shape))
    exact = widened(items, kind)
    assert finite == fmt.can_encode(exact).all()
    if finite:
        assert found.tobytes() == fmt.pack(fmt.encode(exact, importance), shape).tobytes()


@pytest.mark.parametrize("fmt", INTEGERS, ids=str)
@pytest.mark.parametrize("code", [None, 0x7F, 0xFF])
def test_fp8_is_rounded_by_its_numbers(fmt: IntegerFormat, code: int | None) -> None:
    rng, source, shape = np.random.default_rng(2), FORMATS["fp8-e4m3-b32"], (37, 70)
    assert isinstance(source, FP8Format)
    resident = source.encode(rng.standard_normal(shape, np.float32)).copy()
    if code is not None:
        resident[36 * 70 + 69] = code
    codes, scales = source.split(resident, shape)
    pieces = [codes.reshape(-1), scales.reshape(-1).view(np.uint8)]
    packing = Packing(
        PackKind.ENCODE,
        *(0, False, 0, *shape),
        Items(0, ITEM_E4M3, 0, 70, 1),
        Items(1, ITEM_F32, 0, 4 * scales.shape[1], 4),
        (32, 32),
        fmt.bits,
        fmt.group,
        0,
        fmt.panel_nbytes(70),
    )
    found, finite = both(packing, pieces, fmt.resident_nbytes(shape))
    assert finite == (code is None)
    if finite:
        wanted = fmt.pack(fmt.encode(source.decode(resident, shape)), shape)
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
@settings(max_examples=examples(15))
@given(st.integers(1, 30), st.integers(1, 3), st.integers(0, 7), st.booleans(), seeds)
def test_blocks_become_panels(
    kind: BlockType, rows: int, blocks: int, extra: int, apart: bool, seed: int
) -> None:
    """Rows between others, at any address, and panels that alternate with another matrix's."""
    rng, shape = np.random.default_rng(seed), (rows, blocks * kind.block)
    data = random_blocks(rng, kind, shape)
    step = data.shape[1] + extra
    piece = rng.integers(0, 256, extra + rows * step, np.uint8)
    piece[extra:].reshape(rows, step)[:, : data.shape[1]] = data
    where = Items(0, ITEM_BLOCK + kind.number, extra, step, kind.nbytes)
    panel = kind.format.panel_nbytes(shape[1])
    stride = 2 * panel if apart else panel
    packing = Packing(PackKind.BLOCKS, 0, False, 0, *shape, where, panel_stride=stride)
    found, finite = both(packing, [piece], packing.out_nbytes)
    assert finite
    panels = np.lib.stride_tricks.as_strided(found, (-(-rows // 8), panel), (stride, 1))
    assert panels.tobytes() == kind.resident(data, shape).tobytes()


def test_what_is_not_there_is_not_read() -> None:
    piece, out = np.zeros(39, np.uint8), np.zeros(40, np.uint8)
    packing = Packing(PackKind.MOVE, 0, False, 0, 2, 5, Items(0, ITEM_F32, 0, 20, 4))
    with pytest.raises(ValueError, match="end at 40 of 39 bytes"):
        native.pack(packing, [piece], out)
    with pytest.raises(ValueError, match="takes 40 bytes, not 39"):
        native.pack(packing, [out], piece)


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if not f.is_plain], ids=str)
def test_scans_find_what_is_not_finite(fmt: Format) -> None:
    shape = (20, 96)
    resident = fmt.pack(fmt.encode(np.ones(shape, np.float32)), shape).copy()
    scans = fmt.scans(shape, fmt.panel_nbytes(shape[1]))
    assert native.all_finite(resident, scans)
    for scan in scans:
        spoilt = resident.copy()
        last = scan.offset + (scan.num_runs - 1) * scan.stride + scan.nbytes
        spoilt[last - 4 : last] = 0xFF
        assert not native.all_finite(spoilt, scans)
