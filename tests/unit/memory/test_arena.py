"""The mapping behind slots and K/V blocks."""

import gc

import numpy as np
import pytest

from colibri.checkpoint.crc32c import crc32c
from colibri.errors import BudgetError
from colibri.kernels.api import EMPTY
from colibri.kernels.mapping import HUGE_PAGE, Mapping, mapping_nbytes
from colibri.memory.arena import Arena
from colibri.memory.budget import process_rss
from tests.unit.memory.records import KINDS, library

MIB = 1 << 20


def test_slots_lie_one_after_another() -> None:
    arena = Arena([4096, 12288], [2, 3])
    assert arena.bases.tolist() == [0, 4096, 8192, 20480, 32768]
    assert arena.data.size == 45056
    assert arena.ranges == [range(0, 2), range(2, 5)]
    assert arena.data.ctypes.data % HUGE_PAGE == 0
    assert (arena.words == EMPTY).all()
    assert arena.num_slots == 5


def test_an_arena_may_be_empty() -> None:
    assert Arena([], []).num_slots == 0
    assert Arena([4096], [0]).num_slots == 0


def test_memory_is_resident_only_where_it_was_touched() -> None:
    before = process_rss()
    mapping = Mapping(256 * MIB, "a test")
    assert process_rss() - before < 16 * MIB
    mapping.data[: 64 * MIB] = 1
    assert 48 * MIB < process_rss() - before < 80 * MIB
    view = mapping.data[: 64 * MIB]
    mapping.close()
    assert process_rss() - before < 16 * MIB
    assert not view.any()


def test_views_outlive_the_mapping() -> None:
    mapping = Mapping(MIB, "a test")
    view = mapping.data[10:20]
    view[:] = 7
    del mapping
    gc.collect()
    assert view.tolist() == [7] * 10


def test_sizes_are_counted_in_huge_pages() -> None:
    assert [mapping_nbytes(n) for n in (0, 1, HUGE_PAGE, HUGE_PAGE + 1)] == [
        0,
        HUGE_PAGE,
        HUGE_PAGE,
        2 * HUGE_PAGE,
    ]


def test_what_the_system_refuses_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match=r"refuses 4096\.0 TiB for a test"):
        Mapping(1 << 52, "a test")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 100_003, 49151, 49152, 98311, 300_001])
def test_the_library_agrees_on_checksums(kind: str, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size + 1, np.uint8)[1:]
    found = library(kind)
    if found is None:
        assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    else:
        pointer = found.ffi.from_buffer("uint8_t[]", data)
        half = found.lib.colibri_crc32c(0, pointer, size // 2)
        whole = found.lib.colibri_crc32c(half, pointer + size // 2, size - size // 2)
        assert whole == found.lib.colibri_crc32c(0, pointer, size) == crc32c(data)


def test_discarded_slots_read_zeros_and_serve_again() -> None:
    arena = Arena([MIB], [8])
    arena.data[:] = 3
    arena.touched[:] = True
    arena.discard(np.array([2, 5, 6, 7], np.int64))
    filled = arena.data.reshape(8, MIB).any(axis=1)
    assert filled.tolist() == arena.touched.tolist() == [1, 1, 0, 1, 1, 0, 0, 0]
    arena.data[:] = 4
    assert (arena.data == 4).all()
    arena.discard(np.empty(0, np.int64))
    assert (arena.data == 4).all()
