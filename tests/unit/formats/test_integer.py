"""Integer formats, held to the text of their module: codes, scales, panels, padding, error."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.errors import NumericsError
from colibri.formats import FORMATS, PANEL_ROWS, IntegerFormat

ALL = [fmt for fmt in FORMATS.values() if isinstance(fmt, IntegerFormat)]
LARGEST = 65504.0  # of float16
each_format = pytest.mark.parametrize("fmt", ALL, ids=repr)
shapes = st.tuples(st.integers(1, 20), st.integers(1, 150))
seeds = st.integers(0, 2**32 - 1)


def up(count: int, multiple: int) -> int:
    """`count` rounded up."""
    return (count + multiple - 1) // multiple * multiple


def top(fmt: IntegerFormat) -> int:
    """The size of the most negative code."""
    return 8 if fmt.bits == 4 else 128


def random(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Weights whose rows differ in size by orders of magnitude."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-4, 3, (shape[0], 1))
    return (rng.standard_normal(shape) * sizes).astype(np.float32)


def rounded(fmt: IntegerFormat, scales: np.ndarray) -> np.ndarray:
    """Scales as the format has them."""
    return fmt.scale.to_float32(fmt.scale.from_float32(scales.astype(np.float32)))


def numbers(fmt: IntegerFormat, data: bytes) -> list[float]:
    """Scales out of bytes: float16, or the upper half of a float32."""
    if fmt.name.endswith("-bf16"):
        wide = b"".join(bytes(2) + data[i : i + 2] for i in range(0, len(data), 2))
        return np.frombuffer(wide, "<f4").astype(float).tolist()
    return np.frombuffer(data, "<f2").astype(float).tolist()


def through(fmt: IntegerFormat, weights: np.ndarray) -> np.ndarray:
    """Encoded, packed and decoded."""
    return fmt.decode(fmt.pack(fmt.encode(weights), weights.shape), weights.shape)


def stored_parts(
    fmt: IntegerFormat, stored: np.ndarray, shape: tuple[int, int]
) -> tuple[list[list[int]], list[list[float]]]:
    """Codes and scales of the stored bytes, read one by one as the module's text says."""
    rows, columns = up(shape[0], PANEL_ROWS), up(shape[1], fmt.group)
    data, row_bytes = stored.tobytes(), columns * fmt.bits // 8
    codes = []
    for row in range(rows):
        line = data[row * row_bytes : (row + 1) * row_bytes]
        if fmt.bits == 4:
            codes.append([(line[k // 2] >> (4 * (k % 2)) & 15) - 8 for k in range(columns)])
        else:
            codes.append([byte - 256 if byte > 127 else byte for byte in line])
    flat = numbers(fmt, data[rows * row_bytes :])
    groups = columns // fmt.group
    return codes, [flat[row * groups : (row + 1) * groups] for row in range(rows)]


def resident_parts(
    fmt: IntegerFormat, resident: np.ndarray, shape: tuple[int, int]
) -> tuple[list[list[int]], list[list[float]]]:
    """Codes and scales of the resident bytes, nibble by nibble as the module's text says."""
    rows, columns = up(shape[0], PANEL_ROWS), up(shape[1], fmt.group)
    data, groups = resident.tobytes(), columns // fmt.group
    panel_bytes = groups * PANEL_ROWS * 2 + PANEL_ROWS * columns * fmt.bits // 8
    codes = [[99] * columns for _ in range(rows)]
    scales = [[-1.0] * groups for _ in range(rows)]
    for row in range(rows):
        panel = data[row // 8 * panel_bytes :]
        lane = row % 8
        for group in range(groups):
            at = 2 * (8 * group + lane)
            scales[row][group] = numbers(fmt, panel[at : at + 2])[0]
        for k in range(columns):
            chunk, place = divmod(k, 8 if fmt.bits == 4 else 4)
            byte = panel[groups * 16 + 32 * chunk + 4 * lane + place % 4]
            if fmt.bits == 4:
                codes[row][k] = (byte & 15 if place < 4 else byte >> 4) - 8
            else:
                codes[row][k] = byte - 256 if byte > 127 else byte
    return codes, scales


@each_format
@given(shapes)
def test_sizes(fmt: IntegerFormat, shape: tuple[int, int]) -> None:
    rows, columns = up(shape[0], 8), up(shape[1], fmt.group)
    wanted = rows * columns * fmt.bits // 8 + rows * (columns // fmt.group) * 2
    assert fmt.nbytes(shape) == fmt.resident_nbytes(shape) == wanted
    assert fmt.panel_nbytes(shape[1]) * (rows // 8) == wanted


@each_format
@settings(max_examples=15)
@given(shapes, seeds)
def test_layouts_nibble_by_nibble(fmt: IntegerFormat, shape: tuple[int, int], seed: int) -> None:
    stored = fmt.encode(random(shape, seed))
    resident = fmt.pack(stored, shape)
    assert stored.dtype == resident.dtype == np.uint8
    assert stored.shape == resident.shape == (fmt.nbytes(shape),)
    codes, scales = stored_parts(fmt, stored, shape)
    assert resident_parts(fmt, resident, shape) == (codes, scales)
    split_codes, split_scales = fmt.split(resident, shape)
    assert split_codes.dtype == np.int8
    assert split_codes.tolist() == codes
    assert split_scales.dtype == np.float32
    assert split_scales.tolist() == scales


@each_format
@settings(max_examples=15)
@given(shapes, seeds)
def test_pack_moves_and_never_changes(
    fmt: IntegerFormat, shape: tuple[int, int], seed: int
) -> None:
    stored = fmt.encode(random(shape, seed))
    resident = fmt.pack(stored, shape)
    before, after = stored_parts(fmt, stored, shape), resident_parts(fmt, resident, shape)
    for old, new in zip(before, after, strict=True):
        assert Counter(np.ravel(old).tolist()) == Counter(np.ravel(new).tolist())


@each_format
@settings(max_examples=15)
@given(shapes, seeds)
def test_decode_is_code_times_scale(fmt: IntegerFormat, shape: tuple[int, int], seed: int) -> None:
    weights = random(shape, seed)
    codes, scales = stored_parts(fmt, fmt.encode(weights), shape)
    wide = np.array(codes, np.float64) * np.repeat(np.array(scales), fmt.group, axis=1)
    found = through(fmt, weights)
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert np.array_equal(found, wide[: shape[0], : shape[1]])


@each_format
@settings(max_examples=15)
@given(shapes, seeds)
def test_padding_is_zero(fmt: IntegerFormat, shape: tuple[int, int], seed: int) -> None:
    codes, scales = fmt.split(fmt.pack(fmt.encode(random(shape, seed)), shape), shape)
    assert not codes[shape[0] :].any()
    assert not codes[:, shape[1] :].any()
    assert not scales[shape[0] :].any()


@each_format
@settings(max_examples=15)
@given(shapes, seeds)
def test_codes_on_the_grid_come_back_exactly(
    fmt: IntegerFormat, shape: tuple[int, int], seed: int
) -> None:
    """A matrix that already is code * float16, with an extreme code in each group, is kept."""
    rng = np.random.default_rng(seed)
    largest = top(fmt) - 1
    codes = rng.integers(-largest, largest, shape, endpoint=True)
    codes[:, :: fmt.group] = rng.choice([-largest, largest], codes[:, :: fmt.group].shape)
    scales = rng.uniform(1e-3, 10, (shape[0], up(shape[1], fmt.group) // fmt.group))
    wide = np.repeat(rounded(fmt, scales), fmt.group, axis=1)
    weights = codes.astype(np.float32) * wide[:, : shape[1]]
    assert np.array_equal(through(fmt, weights), weights)


@each_format
def test_the_most_negative_code_is_used(fmt: IntegerFormat) -> None:
    weights = np.zeros((1, fmt.group), np.float32)
    weights[0, :3] = -top(fmt), top(fmt) - 1, 1
    assert np.array_equal(through(fmt, weights), weights)
    assert np.array_equal(through(fmt, -weights), -weights)  # by a negative scale


@each_format
@settings(max_examples=25)
@given(shapes, seeds)
def test_error_bound(fmt: IntegerFormat, shape: tuple[int, int], seed: int) -> None:
    """In the mean square of a group: no more than half a step, the largest weight at `top - 1`.

    float16 rounds the scale by 2^-11 of itself, or by 2^-25 where that is more.
    """
    weights = random(shape, seed)
    error = np.abs(through(fmt, weights).astype(np.float64) - weights)
    for start in range(0, shape[1], fmt.group):
        group = slice(start, start + fmt.group)
        largest = np.abs(weights[:, group]).max(axis=1)
        rms = np.sqrt(np.square(error[:, group]).mean(axis=1))
        step = largest / (top(fmt) - 1)
        padding = np.sqrt(fmt.group / error[:, group].shape[1])
        rounding = step * 2.0**-9 + top(fmt) * 2.0**-25
        assert (rms <= (step / 2 + rounding) * padding).all()
        assert (error[:, group].max(axis=1) <= largest).all()


@pytest.mark.parametrize(("name", "limit"), [("int8-g64", 0.01), ("int4-g64", 0.0974)])
def test_error_on_normal_weights(name: str, limit: float) -> None:
    weights = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    error = through(FORMATS[name], weights) - weights  # type: ignore[arg-type]
    assert np.sqrt(np.square(error).mean()) < limit


@each_format
def test_importance_lowers_the_error_of_what_matters(fmt: IntegerFormat) -> None:
    rng, shape = np.random.default_rng(4), (64, 512)
    weights = rng.standard_normal(shape, np.float32)
    importance = np.exp(2 * rng.standard_normal(shape[1])).astype(np.float32)
    alike, weighed = (
        np.square(fmt.decode(fmt.pack(fmt.encode(weights, given), shape), shape) - weights)
        for given in (None, importance)
    )
    assert (weighed @ importance).sum() < (0.85 if fmt.bits == 4 else 0.99) * (
        alike @ importance
    ).sum()


@each_format
def test_equal_importance_is_none(fmt: IntegerFormat) -> None:
    weights = random((20, 150), 1)
    found = fmt.encode(weights, np.full(150, 0.25, np.float32))
    both = [fmt.decode(fmt.pack(c, (20, 150)), (20, 150)) for c in (found, fmt.encode(weights))]
    errors = [np.square(each - weights).sum() for each in both]
    assert errors[0] <= errors[1] * (1 + 1e-5)


@each_format
def test_what_does_not_matter_may_be_wrong(fmt: IntegerFormat) -> None:
    """A column that meets no input does not widen the steps of its neighbours."""
    weights = np.full((8, fmt.group), 0.5, np.float32)
    weights[:, 3] = 100.0
    importance = np.ones(fmt.group, np.float32)
    importance[3] = 0
    found = fmt.decode(fmt.pack(fmt.encode(weights, importance), weights.shape), weights.shape)
    plain = through(fmt, weights)
    kept = importance > 0
    assert np.abs(found - weights)[:, kept].max() <= np.abs(plain - weights)[:, kept].max()


@each_format
def test_groups_of_zeros_stay_zero(fmt: IntegerFormat) -> None:
    weights = np.zeros((3, 3 * fmt.group), np.float32)
    weights[1, fmt.group : 2 * fmt.group] = 1
    weights[2] = -0.0
    found = through(fmt, weights)
    assert np.array_equal(found, weights)
    assert not np.isnan(found).any()


@each_format
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_weight_that_has_a_code(fmt: IntegerFormat, sign: int) -> None:
    weights = np.full((2, fmt.group), sign * LARGEST * top(fmt), np.float32)
    wanted = sign * top(fmt) * rounded(fmt, np.float32([LARGEST]))[0]
    assert np.array_equal(through(fmt, weights), np.full_like(weights, wanted))


@each_format
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -1e30])
def test_what_has_no_code_is_refused(fmt: IntegerFormat, value: float) -> None:
    weights = np.ones((4, fmt.group + 5), np.float32)
    weights[2, fmt.group + 1] = value
    with pytest.raises(NumericsError) as refusal:
        fmt.encode(weights)
    assert f"[2, {fmt.group + 1}]" in str(refusal.value)
    assert fmt.name in str(refusal.value)


@each_format
@pytest.mark.parametrize("size", [1e-45, 1e-40, 2.0**-30, 2.0**-25, 2.0**-24, 1e-6, 1e-5])
def test_weights_below_the_scales_of_float16(fmt: IntegerFormat, size: float) -> None:
    """A scale can be off by half the least float16, at most times the largest code."""
    rng = np.random.default_rng(1)
    weights = (size * rng.uniform(-1, 1, (8, fmt.group))).astype(np.float32)
    error = np.abs(through(fmt, weights).astype(np.float64) - weights)
    largest = np.abs(weights).max(axis=1)
    bound = largest / (top(fmt) - 1) + top(fmt) * 2.0**-25
    assert (np.sqrt(np.square(error).mean(axis=1)) <= bound).all()
    assert (error.max(axis=1) <= largest).all()


@each_format
def test_an_empty_tail_of_a_larger_buffer_is_not_read(fmt: IntegerFormat) -> None:
    shape = (5, 40)
    weights = random(shape, 3)
    resident = fmt.pack(fmt.encode(weights), shape)
    longer = np.concatenate([resident, np.full(100, 255, np.uint8)])
    assert np.array_equal(fmt.decode(longer, shape), fmt.decode(resident, shape))
