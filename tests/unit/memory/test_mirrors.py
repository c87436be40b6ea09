"""Several drives: the same bytes whatever answers, and mirrors that fail are done without."""

import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri.errors import CheckpointError, ReadError, SettingsError
from colibri.formats import get_format
from colibri.kernels.api import FAILED, READY
from colibri.memory import opening
from colibri.memory.expert_store import ExpertStore
from colibri.memory.mirror import open_mirror, open_mirrors
from colibri.memory.opening import open_store
from colibri.memory.reader_config import ReaderConfig
from colibri.memory.receipt import RECEIPT, Receipt
from colibri.memory.staging import plan_stage, stage, verify_mirror
from tests.unit.memory.records import KINDS, Records, container_model, library, pieces_model

EXPERTS = 6
INT8 = get_format("int8-g32")


def model(folder: Path, kind: str, num_experts: int = EXPERTS) -> Records:
    folder.mkdir()
    if kind == "hub":
        return pieces_model(folder, num_experts=num_experts)
    records = container_model(folder, INT8, num_layers=2, num_experts=num_experts)
    (folder / "colibri.json").write_text("{}")
    return records


def copied(records: Records, folder: Path) -> Path:
    shutil.copytree(records.index.files[0].parent, folder)
    return folder


def staged(records: Records, folder: Path, *numbers: int) -> Path:
    heat = np.zeros(records.index.file.shape[:2])
    heat.reshape(-1)[list(numbers)] = np.arange(len(numbers), 0, -1)
    everything = plan_stage(records.index, folder, heat, None, 0)
    stage(records.index, folder, replace(everything, records=everything.records[: len(numbers)]))
    return folder


def opened(
    records: Records, kind: str, *mirrors: Path, slots: int = 12, **config: object
) -> ExpertStore:
    reader = ReaderConfig(mirrors=mirrors, **config)  # type: ignore[arg-type]
    return open_store(records.index, [slots], library=library(kind), num_threads=3, reader=reader)


def read_all(records: Records, store: ExpertStore) -> None:
    """Every record, each as it must be."""
    for row, layout in enumerate(records.index.layers):
        experts = np.arange(layout.num_experts, dtype=np.int32)
        for some in np.array_split(experts, 3):
            with store.lease(layout.layer, some) as slots:
                for expert, slot in zip(some.tolist(), slots.tolist(), strict=True):
                    store.table.wait(slot)
                    assert store.table.states[slot] == READY, store.failure(slot)
                    starts = store.table.parts[slot].tolist()
                    for start, data in zip(starts, records.parts[row, expert], strict=False):
                        assert np.array_equal(store.table.arena[start : start + data.size], data)


def dropped(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "is not read any more" in r.getMessage()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["hub", "container"])
@pytest.mark.parametrize("block", [0, 4096, 8192, 1 << 20])
def test_a_whole_mirror_shares_the_work(tmp_path: Path, kind: str, what: str, block: int) -> None:
    records = model(tmp_path / "model", what)
    store = opened(records, kind, copied(records, tmp_path / "copy"), block=block, slots=4)
    read_all(records, store)
    total = 2 * EXPERTS * records.record_nbytes
    given = store._reader.stats().drive_bytes
    assert sum(given) == store.stats.bytes_read == total
    assert all(given)
    store.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["hub", "container"])
def test_a_partial_mirror_gives_what_it_holds(tmp_path: Path, kind: str, what: str) -> None:
    records = model(tmp_path / "model", what)
    mirror = staged(records, tmp_path / "mirror", 7, 0, 2)
    assert open_mirror(mirror, records.index).present.nonzero()[0].tolist() == [0, 2, 7]
    store = opened(records, kind, mirror)
    read_all(records, store)
    assert 0 < store._reader.stats().drive_bytes[1] <= 3 * records.record_nbytes
    store.close()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    held=st.lists(st.sets(st.integers(0, 11), min_size=1), max_size=3),
    block=st.sampled_from([0, 4096, 12288]),
    what=st.sampled_from(["hub", "container"]),
)
def test_any_set_of_mirrors_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    held: list[set[int]],
    block: int,
    what: str,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    records = model(folder / "model", what)
    mirrors = [staged(records, folder / f"m{i}", *numbers) for i, numbers in enumerate(held)]
    store = opened(records, kind, *mirrors, block=block, slots=5)
    read_all(records, store)
    store.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["hub", "container"])
def test_a_mirror_that_goes_away_is_done_without(
    tmp_path: Path, kind: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    records = model(tmp_path / "model", what)
    mirror = copied(records, tmp_path / "copy")
    store = opened(records, kind, mirror, slots=4)
    read_all(records, store)
    for path in records.index.files:
        os.truncate(mirror / path.name, 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            read_all(records, store)
    assert store._reader.stats().rescued >= 1
    assert store.stats.failed == 0
    store.close()
    assert len(dropped(caplog)) == 1
    assert str(mirror) in dropped(caplog)[0]
    assert "it ends before a record does" in dropped(caplog)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mirror_helps_where_the_model_has_shrunk(tmp_path: Path, kind: str) -> None:
    records = model(tmp_path / "model", "container")
    mirror = copied(records, tmp_path / "copy")
    alone, both = opened(records, kind), opened(records, kind, mirror)
    os.truncate(records.index.files[1], 4096)
    read_all(records, both)
    both.close()
    with alone.lease(4, np.arange(2, dtype=np.int32)) as slots:
        for slot in slots.tolist():
            alone.table.wait(slot)
        assert set(alone.table.states[slots].tolist()) == {FAILED}
        assert re.search(r"model/experts-1\.bin, byte \d+", str(alone.failure(int(slots[0]))))
    with alone.lease(1, np.arange(2, dtype=np.int32)) as slots:
        for slot in slots.tolist():
            alone.table.wait(slot)
        assert set(alone.table.states[slots].tolist()) == {READY}
    alone.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["hub", "container"])
@pytest.mark.parametrize("block", [0, 4096])
def test_damage_on_a_mirror_is_found_and_mended(
    tmp_path: Path, kind: str, what: str, block: int, caplog: pytest.LogCaptureFixture
) -> None:
    records = model(tmp_path / "model", what)
    mirror = staged(records, tmp_path / "mirror", *range(12))
    store = opened(records, kind, mirror, block=block)
    for path in records.index.files:
        damage(mirror / path.name)
    with caplog.at_level(logging.WARNING):
        read_all(records, store)
    assert store.stats.failed == 0
    store.close()
    assert len(dropped(caplog)) == 1
    assert "checksum" in dropped(caplog)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_the_model_is_mended_by_a_mirror(tmp_path: Path, kind: str) -> None:
    records = model(tmp_path / "model", "container")
    mirror = staged(records, tmp_path / "mirror", *range(12))
    store = opened(records, kind, mirror)
    for path in records.index.files:
        damage(path)
    read_all(records, store)
    assert store.stats.failed == 0
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_checks_can_be_turned_off(tmp_path: Path, kind: str) -> None:
    records = model(tmp_path / "model", "container")
    damage(records.index.files[0])
    store = opened(records, kind, verify=False)
    with store.lease(1, np.arange(EXPERTS, dtype=np.int32)) as slots:
        for slot in slots.tolist():
            store.table.wait(slot)
            failed = store.table.states[slot] == FAILED
            assert not failed or not isinstance(store.failure(slot), ReadError)
    store.close()


def damage(path: Path) -> None:
    """Flip bits of everything but the first page."""
    body = bytearray(path.read_bytes())
    body[4096:] = bytes(255 - byte if i % 97 == 0 else byte for i, byte in enumerate(body[4096:]))
    with path.open("r+b") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


# ---- What is refused at start.


def test_no_directory_is_refused(tmp_path: Path) -> None:
    index = model(tmp_path / "model", "hub").index
    with pytest.raises(SettingsError, match="there is no such directory"):
        open_mirrors([tmp_path / "nowhere"], index)
    with pytest.raises(SettingsError, match="is read already"):
        open_mirrors([index.files[0].parent], index)
    with pytest.raises(SettingsError, match="at most 7"):
        open_mirrors([tmp_path] * 8, index)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda copy: (copy / "shard-0.bin").unlink(), "shard-0.bin is missing and there is no"),
        (lambda copy: os.truncate(copy / "shard-1.bin", 99), "has 99 bytes, the model's has"),
        (lambda copy: damage(copy / "shard-0.bin"), "not that of|holds other weights"),
    ],
)
def test_a_bad_whole_copy_is_refused(tmp_path: Path, spoil: object, message: str) -> None:
    records = model(tmp_path / "model", "hub")
    copy = copied(records, tmp_path / "copy")
    spoil(copy)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        open_mirror(copy, records.index)


def test_a_copy_of_another_container_is_refused(tmp_path: Path) -> None:
    records = model(tmp_path / "model", "container")
    copy = copied(records, tmp_path / "copy")
    (copy / "colibri.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"colibri\.json is not that of the model"):
        open_mirror(copy, records.index)


def test_a_receipt_of_another_state_of_the_model_is_refused(tmp_path: Path) -> None:
    records = model(tmp_path / "model", "hub")
    mirror = staged(records, tmp_path / "mirror", 0, 1)
    damage(records.index.files[0])
    with pytest.raises(
        CheckpointError, match=r"written for other files|not those that were copied"
    ):
        open_mirror(mirror, records.index)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ('{"version": 2}', "version 2"),
        ('{"version": 1}', "broken"),
        ('{"version": 1, "files": {}, "manifest": "", "records": {"9": 0}}', "broken"),
        (
            '{"version": 1, "files": {}, "manifest": "",'
            ' "records": {"1": {"experts": [9], "crc32c": [1]}}}',
            "an expert that the model does not have",
        ),
        (
            '{"version": 1, "files": {}, "manifest": "",'
            ' "records": {"1": {"experts": [1, 2], "crc32c": [1]}}}',
            "not as many checksums",
        ),
    ],
)
def test_a_bad_receipt_is_refused(tmp_path: Path, text: str, message: str) -> None:
    records = model(tmp_path / "model", "hub")
    (tmp_path / RECEIPT).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_mirror(tmp_path, records.index)


# ---- Staging.


def test_hot_records_go_first_and_within_budget(tmp_path: Path) -> None:
    index = model(tmp_path / "model", "container").index
    heat = np.zeros((2, EXPERTS))
    heat[1, 4], heat[0, 2], heat[1, 0] = 9, 5, 1
    size = int(index.nbytes[0, 0, 0])
    planned = plan_stage(index, tmp_path / "mirror", heat, 2 * size, 0)
    assert planned.records.tolist() == [EXPERTS + 4, 2]
    assert planned.nbytes == 2 * size
    assert planned.heat_share == pytest.approx(14 / 15)
    assert plan_stage(index, tmp_path / "mirror", heat, None, planned.free_bytes).nbytes == 0
    unknown = plan_stage(index, tmp_path / "mirror", None, 3 * size, 0)
    assert unknown.records.tolist() == [0, EXPERTS, 1]
    assert unknown.heat_share is None


@pytest.mark.parametrize("what", ["hub", "container"])
def test_staging_again_adds_and_deletes_nothing(tmp_path: Path, what: str) -> None:
    records = model(tmp_path / "model", what)
    index, mirror = records.index, tmp_path / "mirror"
    staged(records, mirror, 3, 5)
    assert verify_mirror(index, mirror) == (2, 2 * records.record_nbytes)
    for path in index.files:
        if (mirror / path.name).exists():
            assert (mirror / path.name).stat().st_size == path.stat().st_size
    staged(records, mirror, 8)
    assert verify_mirror(index, mirror)[0] == 3
    assert Receipt.read(mirror, index).present.nonzero()[0].tolist() == [3, 5, 8]
    assert not list(mirror.glob("*.staging"))


def test_a_staging_that_is_stopped_can_go_on(tmp_path: Path) -> None:
    records = model(tmp_path / "model", "hub")
    index, mirror = records.index, tmp_path / "mirror"
    planned = plan_stage(index, mirror, None, None, 0)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage(index, mirror, planned, stop)
    assert verify_mirror(index, mirror) == (0, 0)
    stage(index, mirror, plan_stage(index, mirror, None, None, 0))
    assert verify_mirror(index, mirror)[0] == 2 * EXPERTS


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    records = model(tmp_path / "model", "hub")
    copy = copied(records, tmp_path / "copy")
    with pytest.raises(CheckpointError, match="it is no partial mirror"):
        plan_stage(records.index, copy, None, None, 0)


def test_a_damaged_model_is_not_copied(tmp_path: Path) -> None:
    records = model(tmp_path / "model", "container")
    damage(records.index.files[0])
    planned = plan_stage(records.index, tmp_path / "mirror", None, None, 0)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        stage(records.index, tmp_path / "mirror", planned)


@pytest.mark.parametrize("what", ["hub", "container"])
def test_damage_is_found_by_verify(tmp_path: Path, what: str) -> None:
    records = model(tmp_path / "model", what)
    mirror = staged(records, tmp_path / "mirror", 0, 1, 7)
    for path in records.index.files:
        if (mirror / path.name).exists():
            damage(mirror / path.name)
    with pytest.raises(CheckpointError, match="3 of 3 records are damaged, the first is expert 0"):
        verify_mirror(records.index, mirror)


def test_a_whole_mirror_is_verified_too(tmp_path: Path) -> None:
    records = model(tmp_path / "model", "container")
    copy = copied(records, tmp_path / "copy")
    assert verify_mirror(records.index, copy)[0] == 2 * EXPERTS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", [0, 1])
def test_a_drive_a_thousand_times_faster_does_all_the_work(
    tmp_path: Path, kind: str, fast: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = model(tmp_path / "model", "container")
    weights = [1, 1]
    weights[fast] = 1000
    monkeypatch.setattr(opening, "_weights", lambda readings: weights)
    store = opened(records, kind, copied(records, tmp_path / "copy"), block=4096)
    read_all(records, store)
    stats = store.stats
    store.close()
    assert stats.drive_bytes[fast] == stats.bytes_read > 0
