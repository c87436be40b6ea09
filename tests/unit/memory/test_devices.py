"""What is remembered of a drive, and how it is found out."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from colibri.errors import ReadError
from colibri.formats import get_format
from colibri.kernels.api import EMPTY
from colibri.memory import opening
from colibri.memory.arena import Arena
from colibri.memory.devices import NAME, Reading, device_key, remember, remembered
from colibri.memory.drives import Drives
from colibri.memory.jobs import Failure, Jobs, Reason
from colibri.memory.measuring import MOST_BYTES, MOST_S, Measurement
from colibri.memory.null import NullReader
from colibri.memory.opening import find_readings, known_reading, open_store
from colibri.memory.reader_config import ReaderConfig
from colibri.memory.slot_classes import slot_classes
from tests.unit.memory.records import KINDS, Records, container_model, library

FAST = Reading(True, 8, 1 << 20, False, 10**9)
SLOTS = 12


class Drive:
    """A drive without bytes: how fast a way of reading is, and a clock that only it moves."""

    def __init__(self, arena: Arena, speed: Callable[[bool, int, int], float]) -> None:
        self.arena, self.speed = arena, speed
        self.now, self.spent = 0.0, 0
        self.arms: list[tuple[bool, int, int]] = []

    def reader(self, drives: Drives, threads: int, block: int) -> NullReader:
        arm = (drives.files[0].direct[0], threads, block)
        self.arms.append(arm)
        drives.close()
        drive = self

        class Timed(NullReader):
            def submit(self, jobs: Jobs) -> None:
                super().submit(jobs)
                drive.spent += int(jobs.nbytes.sum())
                drive.now += float(jobs.nbytes.sum()) / drive.speed(*arm)

        return Timed(self.arena)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    folder = tmp_path / "model"
    folder.mkdir()
    return container_model(folder, get_format("f32"), num_layers=2, num_experts=SLOTS)


def measured(
    records: Records, speed: Callable[[bool, int, int], float]
) -> tuple[Reading, Drive, Measurement]:
    arena = make_arena(records)
    drive = Drive(arena, speed)
    everything = np.arange(2 * SLOTS)
    found = Measurement(records.index, arena, drive.reader, everything, lambda: drive.now)
    reading = found.find(Reading(block=8192))
    assert (arena.states == EMPTY).all()
    return reading, drive, found


def make_arena(records: Records) -> Arena:
    return Arena([found.slot_nbytes for found in slot_classes(records.index)], [SLOTS])


def test_a_drive_without_preferences_is_read_as_usual(records: Records) -> None:
    reading, drive, _ = measured(records, lambda direct, threads, block: 1e9)
    assert reading == Reading(True, 4, 8192, False, 10**9)
    assert len({arm[1] for arm in drive.arms}) > 2


def test_blocks_are_not_so_large_that_one_record_leaves_threads_idle(records: Records) -> None:
    _, drive, _ = measured(records, lambda direct, threads, block: 1e8 * block)
    assert {arm[2] for arm in drive.arms} == {8192}


def test_depth_pays(records: Records) -> None:
    reading, _, _ = measured(records, lambda direct, threads, block: 1e8 * threads)
    assert reading.threads == 8
    assert reading.bytes_per_s == 8 * 10**8


def test_one_at_a_time_where_heads_move(records: Records) -> None:
    reading, _, _ = measured(records, lambda direct, threads, block: 1e8 / threads)
    assert reading.threads == 1


def test_buffered_reads_where_they_are_faster(records: Records) -> None:
    reading, _, _ = measured(records, lambda direct, threads, block: 1e8 if direct else 3e8)
    assert not reading.direct
    assert reading.keep_cache


def test_a_little_better_is_not_better(records: Records) -> None:
    reading, _, _ = measured(records, lambda direct, threads, block: 1e8 if direct else 1.1e8)
    assert reading.direct
    assert not reading.keep_cache


def test_a_slow_drive_is_not_measured_for_long(records: Records) -> None:
    reading, drive, found = measured(records, lambda direct, threads, block: 1e5)
    assert found.exhausted
    assert reading.direct
    longest = SLOTS * records.record_nbytes / 1e5
    assert drive.now < MOST_S + longest
    assert drive.spent == found.spent_bytes < MOST_BYTES


def test_a_drive_that_fails_is_an_error(records: Records) -> None:
    arena = make_arena(records)

    class Broken(NullReader):
        def wait(self, slot: int) -> None:
            if slot in self.demand:
                self.fail(slot, Failure(Reason.TRUNCATED))

    found = Measurement(
        records.index, arena, lambda drives, threads, block: Broken(arena), np.arange(4)
    )
    with pytest.raises(ReadError, match=r"experts-0\.bin, byte 0: cannot be read \(truncated\)"):
        found.find(Reading())


def test_measurements_are_remembered(tmp_path: Path) -> None:
    assert remembered(tmp_path, "a") is None
    assert remembered(None, "a") is None
    remember(tmp_path / "new", "a", FAST)
    remember(tmp_path / "new", "b", Reading())
    assert remembered(tmp_path / "new", "a") == FAST
    assert remembered(tmp_path / "new", "b") == Reading()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"a": 3}',
        '{"a": {"direct": 1, "threads": 4, "block": 5, "keep_cache": true, "bytes_per_s": 1}}',
        '{"a": {"direct": true, "threads": 0, "block": 5, "keep_cache": true, "bytes_per_s": 1}}',
        '{"a": {"direct": true, "threads": 4, "keep_cache": true, "bytes_per_s": 1}}',
    ],
)
def test_what_makes_no_sense_is_forgotten(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    assert remembered(tmp_path, "a") is None
    remember(tmp_path, "a", FAST)
    assert remembered(tmp_path, "a") == FAST


def test_a_cache_that_cannot_be_written_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remember(tmp_path / "file", "a", FAST)
    assert remembered(tmp_path / "file", "a") is None


def test_a_key_names_drive_and_file_system(tmp_path: Path) -> None:
    import os

    path = tmp_path / "records"
    path.write_text("")
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(
        "1 0 0:99 / /other rw - tmpfs none rw\n"
        f"2 0 {number} / / rw shared:1 - ext4 /dev/nvme0n1p2 rw\n"
    )
    assert device_key(path, 5000, root) == f"{number} nvme0n1p2 ext4 8192"
    (root / "sys/dev/block" / number / "device").mkdir(parents=True)
    (root / "sys/dev/block" / number / "device/model").write_text("Fast Drive 9\n")
    assert device_key(path, 4096, root) == f"{number} Fast Drive 9 ext4 4096"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_measured_once(
    tmp_path: Path, kind: str, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, cache = records.index, tmp_path / "cache"
    assert known_reading(index, cache) is None
    config = ReaderConfig(cache=cache)
    open_store(index, [SLOTS], library=library(kind), reader=config).close()
    assert not cache.exists()  # too small to be measured
    monkeypatch.setattr(opening, "LEAST_MODEL", 1)
    arena = make_arena(records)
    monkeypatch.setattr(opening.OtherLoad, "share", lambda load: 0.5)
    (unsure,) = find_readings(index, arena, [], library(kind), config)
    assert unsure == Reading(bytes_per_s=unsure.bytes_per_s)
    assert known_reading(index, cache) is None  # others were busy
    monkeypatch.setattr(opening.OtherLoad, "share", lambda load: None)
    first = find_readings(index, arena, [], library(kind), config)
    assert first[0].bytes_per_s > 0
    assert known_reading(index, cache) == first[0]
    (key,) = json.loads((cache / NAME).read_text())
    remember(cache, key, FAST)
    assert find_readings(index, arena, [], library(kind), config) == [FAST]
    assert find_readings(index, arena, [], library(kind), ReaderConfig()) == [Reading()]
