"""Both readers over a C library whose reads misbehave."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.memory.records import KINDS
from tests.unit.memory.shim import compile_shim, needs_shim, preloaded

SCRIPT = """
import ctypes, pathlib, sys
import numpy as np
from colibri.errors import ReadError
from colibri.kernels.api import FAILED, READY
from tests.unit.memory.records import library, pieces_model
from colibri.memory.opening import open_store

shim, folder, kind = sys.argv[1:]
set_fault = ctypes.CDLL(shim).set_fault
names = ["none", "short page", "short odd", "interrupted", "again", "no direct", "broken", "always"]
for fault, name in enumerate(names):
    records = pieces_model(pathlib.Path(folder), num_experts=4, shift=4000)
    store = open_store(records.index, [8], library=library(kind), num_threads=2)
    set_fault(fault)
    with store.lease(1, np.arange(4, dtype=np.int32)) as slots:
        for expert, slot in enumerate(slots.tolist()):
            store.table.wait(slot)
            failed = name in ("broken", "always")
            assert store.table.states[slot] == (FAILED if failed else READY), name
            if failed:
                assert isinstance(store.failure(slot), ReadError)
                continue
            starts = store.table.parts[slot].tolist()
            for start, data in zip(starts, records.parts[1, expert], strict=True):
                found = store.table.arena[start : start + data.size]
                assert np.array_equal(found, data), (name, expert)
    assert store.stats.bytes_read == (0 if failed else 4 * records.record_nbytes)
    assert store.stats.failed == (4 if failed else 0)
    set_fault(0)
    store.close()
print("all faults met")
"""

ONE_FILE = """
import ctypes, logging, pathlib, shutil, sys
import numpy as np
from colibri.errors import ReadError
from colibri.kernels.api import FAILED, READY
from colibri.memory.opening import open_store
from colibri.memory.reader_config import ReaderConfig
from tests.unit.memory.records import library, pieces_model

shim, folder, kind = sys.argv[1:]
logging.basicConfig(stream=sys.stdout, format="%(message)s")
model, copy = pathlib.Path(folder, "model"), pathlib.Path(folder, "copy")
model.mkdir()
records = pieces_model(model, num_experts=8, shift=4000)
shutil.copytree(model, copy)
break_file = ctypes.CDLL(shim).break_file

def states(mirrors, broken, rounds=3):
    reader = ReaderConfig(mirrors=mirrors, block=4096)
    store = open_store(records.index, [4], library=library(kind), num_threads=3, reader=reader)
    store.table.wait(0)
    break_file(broken.encode())
    found = set()
    for _ in range(rounds):
        for first in range(0, 8, 2):
            with store.lease(1, np.arange(first, first + 2, dtype=np.int32)) as slots:
                for expert, slot in enumerate(slots.tolist(), first):
                    store.table.wait(slot)
                    state = int(store.table.states[slot])
                    found.add(state)
                    if state == FAILED:
                        error = store.failure(slot)
                        assert isinstance(error, ReadError), error
                        assert "model/shard-1.bin, byte" in str(error), error
                        assert "Input/output error" in str(error), error
                        continue
                    starts = store.table.parts[slot].tolist()
                    for start, data in zip(starts, records.parts[1, expert], strict=True):
                        part = store.table.arena[start : start + data.size]
                        assert np.array_equal(part, data), expert
    stats, given = store.stats, store._reader.stats()
    assert stats.hits + stats.misses == stats.requests
    assert len(store._ranges.idle(0, store._leases)) == 4
    store.close()
    break_file(b"")
    return found, given.rescued

assert states((), "nothing")[0] == {READY}
assert states((), "/model/shard-1.bin") == ({FAILED}, 0)
found, rescued = states((copy,), "/model/shard-1.bin")
assert found == {READY} and rescued > 0, (found, rescued)
found, rescued = states((copy,), "/copy/shard-0.bin")
assert found == {READY} and rescued > 0, (found, rescued)
print("done")
"""

ORDER = """
import ctypes, pathlib, sys
import numpy as np
from colibri.formats import F32
from colibri.memory.opening import open_store
from colibri.memory.reader_config import ReaderConfig
from tests.unit.memory.records import container_model, library

shim, folder, kind = sys.argv[1:]
gate = ctypes.CDLL(shim)
gate.read_at.restype = ctypes.c_long
records = container_model(pathlib.Path(folder), F32, num_experts=16)
reader = ReaderConfig(block=4096)
store = open_store(records.index, [16], library=library(kind), num_threads=1, reader=reader)
gate.shut_gate(1)
before = gate.num_reads()
assert store.prefetch(1, np.array([0, 9, 1, 3], np.int32)) == 4
while gate.num_reads() == before:  # until the first block is being read
    pass
with store.lease(1, np.array([2, 5, 9, 11], np.int32)) as slots:
    gate.shut_gate(0)
    for slot in slots.tolist():
        store.table.wait(slot)
with store.lease(1, np.array([0, 1, 3], np.int32)) as slots:
    for slot in slots.tolist():
        store.table.wait(slot)
size = records.record_nbytes
order = [(gate.read_at(i) - 4096) // size for i in range(before, gate.num_reads())]
print(list(dict.fromkeys(order)), [order.count(expert) for expert in (0, 2)], order[:2])
stats = store.stats
pages = stats.abandoned_bytes // 4096
assert sum(stats.drive_bytes) == stats.bytes_read + stats.abandoned_bytes, stats
print(pages)
store.close()
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_shim(tmp_path_factory.mktemp("shim"))


@needs_shim
@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_ends_in_the_right_bytes_or_an_error(
    tmp_path: Path, shim: Path, kind: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, shim, tmp_path, kind],
        env=preloaded(shim),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout == "all faults met\n", result.stderr


@needs_shim
@pytest.mark.parametrize("kind", KINDS)
def test_one_file_that_cannot_be_read(shim: Path, tmp_path: Path, kind: str) -> None:
    """Alone it fails what is in it, by name; with a mirror, nothing fails on either side."""
    result = subprocess.run(
        [sys.executable, "-c", ONE_FILE, shim, tmp_path, kind],
        env=preloaded(shim),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = result.stdout.splitlines()
    assert told[-1:] == ["done"], result.stderr
    assert len(told) == 2
    assert "copy/shard-0.bin" in told[0]
    assert "Input/output error" in told[0]


@needs_shim
@pytest.mark.parametrize("kind", KINDS)
def test_demand_overtakes_prefetch_in_file_order(shim: Path, tmp_path: Path, kind: str) -> None:
    """The library hands out blocks, so demand goes before the rest of a record being read ahead.

    Nobody wants the first one then, so its rest is not read at all, until somebody does.
    """
    result = subprocess.run(
        [sys.executable, "-c", ORDER, shim, tmp_path, kind],
        env=preloaded(shim),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    blocks, abandoned = ("[4, 3]", 1) if kind == "native" else ("[1, 1]", 0)
    wanted = f"[0, 9, 2, 5, 11, 1, 3] {blocks} [0, 9]\n{abandoned}"
    assert result.stdout.strip() == wanted, result.stderr
