"""Tables that stay on disk: the rows that were asked for, each read once, and faults by name."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from colibri.checkpoint.safetensors import TensorSpec, read_header
from colibri.errors import ReadError
from colibri.formats import BF16, F16, F32, FloatFormat
from colibri.memory.row_table import RowTable, RowTableStats
from tests.examples import examples

COLUMNS = 5
DTYPES = {F32: np.float32, F16: np.float16}


def shards(directory: Path, heights: list[int], fmt: FloatFormat = F32) -> list[TensorSpec]:
    """Files of one or two shards each, whose numbers count up."""
    specs, first = [], 0
    for number in range(0, len(heights), 2):
        tensors = {"a": np.zeros(3, np.uint8)}  # rows need not be aligned to anything
        for place, height in enumerate(heights[number : number + 2]):
            values = np.arange(first, first + height * COLUMNS, dtype=np.float32)
            first += height * COLUMNS
            stored = fmt.from_float32(values.reshape(height, COLUMNS))
            tensors[f"shard_{place}"] = stored.view(DTYPES.get(fmt, np.uint16))
        path = directory / f"{number}.safetensors"
        save_file(tensors, path)
        header = read_header(path)
        specs += [spec for name, spec in sorted(header.items()) if name.startswith("shard")]
    return specs


@given_settings(max_examples=examples(20))
@given(
    heights=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    fmt=st.sampled_from([F32, F16, BF16]),
    data=st.data(),
)
def test_rows_are_those_of_the_matrix(
    heights: list[int], fmt: FloatFormat, data: st.DataObject, tmp_path_factory: object
) -> None:
    assert isinstance(tmp_path_factory, pytest.TempPathFactory)
    specs = shards(tmp_path_factory.mktemp("rows"), heights, fmt)
    numbers = data.draw(st.lists(st.integers(0, sum(heights) - 1), max_size=60))
    table = RowTable(specs, fmt)
    try:
        found = table.rows(np.array(numbers, np.int64).reshape(-1, 1))
        assert table.stats.reads == len(set(numbers))
    finally:
        table.close()
    assert found.shape == (len(numbers), 1, COLUMNS)
    every = np.arange(sum(heights) * COLUMNS, dtype=np.float32).reshape(-1, COLUMNS)
    rounded = fmt.to_float32(fmt.from_float32(every))
    np.testing.assert_array_equal(found[:, 0], rounded[numbers])


def test_bytes_are_counted_row_by_row(tmp_path: Path) -> None:
    table = RowTable(shards(tmp_path, [100]), F32)
    table.rows(np.array([3, 3, 7]))
    assert table.stats == RowTableStats(reads=2, bytes_read=2 * 4 * COLUMNS)
    table.rows(np.arange(100))  # on several threads
    assert table.stats == RowTableStats(reads=102, bytes_read=102 * 4 * COLUMNS)
    table.close()


@pytest.mark.parametrize("number", [-1, 8])
def test_a_row_that_is_not_there(number: int, tmp_path: Path) -> None:
    table = RowTable(shards(tmp_path, [5, 3]), F32)
    with pytest.raises(IndexError, match="the table has 8 rows"):
        table.rows(np.array([2, number]))
    table.close()


@pytest.mark.parametrize("number", [1, 60])
def test_a_file_that_was_cut_is_named(number: int, tmp_path: Path) -> None:
    """By the caller's thread, and by others."""
    specs = shards(tmp_path, [60])
    table = RowTable(specs, F32)
    with specs[0].file.open("r+b") as file:
        file.truncate(specs[0].end - 1)
    with pytest.raises(ReadError, match=r"0\.safetensors, byte \d+: wanted 20 bytes .* cut"):
        table.rows(np.arange(60 - number, 60))
    table.close()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    specs = shards(tmp_path, [2])
    specs[0].file.unlink()
    with pytest.raises(ReadError, match=r"0\.safetensors: cannot be opened"):
        RowTable(specs, F32)
