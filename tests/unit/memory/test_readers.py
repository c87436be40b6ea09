"""Both readers on real files: the same bytes, the same errors."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri.checkpoint.experts import PAGE
from colibri.errors import NumericsError, ReadError
from colibri.formats import BF16, F16, F32, Format, get_format
from colibri.kernels.api import FAILED, READY
from colibri.memory.expert_store import ExpertStore
from colibri.memory.opening import open_store
from tests.unit.memory.records import KINDS, Records, container_model, library, pieces_model


@contextmanager
def opened(records: Records, kind: str, slots: int = 4, threads: int = 2) -> Iterator[ExpertStore]:
    store = open_store(records.index, [slots], library=library(kind), num_threads=threads)
    try:
        yield store
    finally:
        store.close()


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int32)


def landed(store: ExpertStore, slots: np.ndarray) -> list[int]:
    for slot in slots.tolist():
        store.table.wait(slot)
    return store.table.states[slots].tolist()


def check(records: Records, store: ExpertStore, row: int, expert: int, slot: int) -> None:
    starts = store.table.parts[slot]
    for start, data in zip(starts.tolist(), records.parts[row, expert], strict=False):
        assert np.array_equal(store.table.arena[start : start + data.size], data)


def the_failure(store: ExpertStore, layer: int, expert: int) -> Exception:
    with store.lease(layer, ids(expert)) as slots:
        assert landed(store, slots) == [FAILED]
        return store.failure(int(slots[0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", [F32, BF16])
@pytest.mark.parametrize("shift", [0, 1, 4095, 4096, 5000])
def test_pieces_land_wherever_they_start(
    tmp_path: Path, kind: str, fmt: Format, shift: int
) -> None:
    records = pieces_model(tmp_path, fmt=fmt, shift=shift)
    with opened(records, kind) as store:
        for row in range(2):
            for experts in ([0, 1, 5], [2, 3, 4]):
                with store.lease(row, ids(*experts)) as slots:
                    assert landed(store, slots) == [READY] * 3
                    for expert, slot in zip(experts, slots.tolist(), strict=True):
                        check(records, store, row, expert, slot)
        stats = store.stats
    assert (stats.requests, stats.misses, stats.hits) == (12, 12, 0)
    assert stats.bytes_read == 12 * records.record_nbytes
    assert stats.evictions == 8
    assert 0 <= stats.slack_bytes <= 12 * 3 * 2 * PAGE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["int4-g64", "int8-g32", "mxfp4", "fp8-e4m3-b32", "f32", "f16"])
def test_container_records_land_and_pass_their_checks(tmp_path: Path, kind: str, name: str) -> None:
    records = container_model(tmp_path, get_format(name), num_layers=2)
    with opened(records, kind) as store:
        with store.lease(4, ids(0, 2, 3)) as slots:
            assert landed(store, slots) == [READY] * 3
            for expert, slot in zip((0, 2, 3), slots.tolist(), strict=True):
                check(records, store, 1, expert, slot)
        assert store.stats.slack_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_fails_the_checksum(tmp_path: Path, kind: str) -> None:
    records = container_model(tmp_path, get_format("int8-g32"))
    damage(records, 2, records.record_nbytes - 1, bytes([255]))
    with opened(records, kind) as store:
        error = the_failure(store, 1, 2)
        assert isinstance(error, ReadError)
        assert re.search(r"experts-0\.bin, byte \d+.*expert 2 of layer 1.*checksum", str(error))
        with store.lease(1, ids(0)) as slots:
            assert landed(store, slots) == [READY]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fmt", "value"),
    [
        (F32, np.float32(np.nan).tobytes()),
        (F32, np.float32(-np.inf).tobytes()),
        (F16, np.float16(np.inf).tobytes()),
        (BF16, b"\x80\x7f"),
        (BF16, b"\xc1\xff"),
    ],
)
@pytest.mark.parametrize("piece", [0, 1, 2])
def test_a_weight_that_is_not_finite_is_named(
    tmp_path: Path, kind: str, fmt: Format, value: bytes, piece: int
) -> None:
    records = pieces_model(tmp_path, fmt=fmt)
    index = records.index
    last = int(index.offset[1, 3, piece] + index.nbytes[1, 3, piece]) - len(value)
    overwrite(index.files[index.file[1, 3, piece]], last, value)
    with opened(records, kind) as store:
        error = the_failure(store, 1, 3)
    assert isinstance(error, NumericsError)
    name = ("gate_proj", "up_proj", "down_proj")[piece]
    assert f"{name} of expert 3 of layer 1 holds a weight that is not finite" in str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "place", "value"), [("int4-g64", 14, b"\x00\xfc"), ("mxfp4", 7, b"\xff")]
)
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_scale_that_is_not_finite_is_named(
    tmp_path: Path, kind: str, name: str, place: int, value: bytes, part: int
) -> None:
    records = container_model(tmp_path, get_format(name))
    layout = records.index.layers[0]
    last_panel = layout.parts[part].rows // 8 - 1
    start = layout.part_deltas[part] + last_panel * layout.parts[part].panel_stride
    unchecked = Records(replace(records.index, crc=None), records.parts)
    damage(unchecked, 1, start + place, value)
    with opened(unchecked, kind) as store:
        error = the_failure(store, 1, 1)
    assert isinstance(error, NumericsError)
    assert f"{layout.parts[part].name} of expert 1 of layer 1 holds a scale" in str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("place", "value"), [(3, b"\x7f"), (5, b"\xff"), (-2, b"\x80\x7f")])
def test_fp8_codes_and_scales_are_looked_at(
    tmp_path: Path, kind: str, place: int, value: bytes
) -> None:
    records = container_model(tmp_path, get_format("fp8-e4m3-b32"))
    part = records.index.layers[0].parts[0]
    nbytes = part.format.nbytes((part.rows, part.columns))
    unchecked = Records(replace(records.index, crc=None), records.parts)
    damage(unchecked, 1, place % nbytes, value)
    with opened(unchecked, kind) as store:
        error = the_failure(store, 1, 1)
    assert isinstance(error, NumericsError)
    assert "gate_proj of expert 1 of layer 1 holds a weight that is not finite" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_may_look_like_nan(tmp_path: Path, kind: str) -> None:
    records = container_model(tmp_path, get_format("int8-g32"))
    unchecked = Records(replace(records.index, crc=None), records.parts)
    damage(unchecked, 1, records.index.layers[0].parts[0].format.group, b"\xff\xff\xff\xff")
    with opened(unchecked, kind) as store, store.lease(1, ids(1)) as slots:
        assert landed(store, slots) == [READY]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_shrinks_fails_what_it_lost(tmp_path: Path, kind: str) -> None:
    records = pieces_model(tmp_path)
    index = records.index
    with opened(records, kind) as store:
        os.truncate(index.files[1], int(index.offset[1, 4, 2]) + 5)
        error = the_failure(store, 1, 4)
        assert isinstance(error, ReadError)
        assert re.search(r"shard-1\.bin, byte \d+: reading expert 4 of layer 1", str(error))
        assert "the file ends before the record" in str(error)
        with store.lease(1, ids(3)) as slots:
            assert landed(store, slots) == [READY]
            check(records, store, 1, 3, int(slots[0]))
        assert store.stats.failed == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_error_names_file_and_reason(tmp_path: Path, kind: str) -> None:
    """A folder opens like a file, and every read of it fails."""
    records = pieces_model(tmp_path)
    records.index.files[1].unlink()
    records.index.files[1].mkdir()
    with opened(records, kind) as store:
        error = the_failure(store, 0, 1)
        assert isinstance(error, ReadError)
        assert "shard-1.bin" in str(error)
        assert os.strerror(21) in str(error)
        for _ in range(20):
            the_failure(store, 0, 2)
        assert (store.table.states != READY).all()
        assert store.stats.hits == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    records = pieces_model(tmp_path)
    records.index.files[1].unlink()
    with pytest.raises(ReadError, match=r"shard-1\.bin: cannot be opened"):
        open_store(records.index, [4], library=library(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_expert_can_be_read_again(tmp_path: Path, kind: str) -> None:
    records = pieces_model(tmp_path)
    path = records.index.files[1]
    body = path.read_bytes()
    with opened(records, kind) as store:
        os.truncate(path, 10)
        the_failure(store, 0, 0)
        overwrite(path, 0, body)
        with store.lease(0, ids(0)) as slots:
            assert landed(store, slots) == [READY]
            check(records, store, 0, 0, int(slots[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_prefetched_experts_are_hits(tmp_path: Path, kind: str) -> None:
    records = pieces_model(tmp_path)
    with opened(records, kind) as store:
        assert store.prefetch(1, ids(0, 1, 2, 3)) == 2
        with store.lease(1, ids(0, 1, 5)) as slots:
            assert landed(store, slots) == [READY] * 3
            for expert, slot in zip((0, 1, 5), slots.tolist(), strict=True):
                check(records, store, 1, expert, slot)
        stats = store.stats
    assert (stats.hits, stats.misses, stats.prefetched) == (2, 1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_prefetches_in_vain_are_called_off(tmp_path: Path, kind: str) -> None:
    records = pieces_model(tmp_path, num_experts=64)
    with opened(records, kind, slots=80, threads=1) as store:
        assert store.prefetch(1, np.arange(40, dtype=np.int32)) == 40
        with store.lease(1, ids(39, 63)) as slots:
            assert landed(store, slots) == [READY, READY]
        called_off = store.stats.withdrawn
        with store.lease(1, np.arange(40, dtype=np.int32)) as slots:
            assert landed(store, slots) == [READY] * 40
            for expert, slot in enumerate(slots.tolist()):
                check(records, store, 1, expert, slot)
        stats = store.stats
    assert called_off == stats.withdrawn
    assert (stats.records, stats.failed) == (41, 0)
    assert stats.misses == 1 + called_off
    assert stats.bytes_read == 41 * records.record_nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_closing_cancels_what_waits(tmp_path: Path, kind: str) -> None:
    records = pieces_model(tmp_path, num_experts=64)
    store = open_store(records.index, [64], library=library(kind), num_threads=1)
    lease = store.lease(0, np.arange(64, dtype=np.int32))
    slots = lease.__enter__()
    store.close()
    assert set(landed(store, slots)) == {FAILED}
    assert isinstance(store.failure(int(slots[-1])), ReadError)
    lease.__exit__(None, None, None)
    store.close()
    with pytest.raises(ReadError, match="closed"), store.lease(0, ids(0)):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_process_does_not_wait_for_ever(tmp_path: Path, kind: str) -> None:
    records = pieces_model(tmp_path, num_experts=64)
    with opened(records, kind, slots=64, threads=1) as store:
        with store.lease(0, np.arange(64, dtype=np.int32)) as slots:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # forking with threads is the point
                child = os.fork()
            if not child:
                try:
                    landed(store, slots)
                    store.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert landed(store, slots) == [READY] * 64
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches=st.lists(st.tuples(st.integers(0, 1), st.sets(st.integers(0, 5), max_size=4))))
def test_any_order_of_leases_finds_its_bytes(
    tmp_path: Path, kind: str, batches: list[tuple[int, set[int]]]
) -> None:
    records = pieces_model(tmp_path)
    with opened(records, kind) as store:
        for row, experts in batches:
            with store.lease(row, ids(*sorted(experts))) as slots:
                assert landed(store, slots) == [READY] * len(experts)
                for expert, slot in zip(sorted(experts), slots.tolist(), strict=True):
                    check(records, store, row, expert, slot)
        stats = store.stats
        assert stats.hits + stats.misses == stats.requests
        assert stats.bytes_read == stats.misses * records.record_nbytes


def damage(records: Records, expert: int, offset: int, data: bytes) -> None:
    index = records.index
    overwrite(index.files[0], int(index.offset[0, expert, 0]) + offset, data)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
