"""Several threads use one store over real readers: the right bytes, and books that add up."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from colibri.errors import ReadError
from colibri.formats import Bytes, get_format
from colibri.kernels.api import LOADING, READY
from colibri.memory.expert_store import ExpertStore
from colibri.memory.opening import open_store
from colibri.memory.read_ahead import Origin
from colibri.memory.reader_config import ReaderConfig
from tests.unit.memory.records import KINDS, Records, container_model, library

EXPERTS, MOST, USERS, TURNS = 12, 3, 3, 120


def checksum(kind: str) -> Callable[[Bytes], int]:
    """Of the library where it reads, so that a sanitizer sees who looks at what landed."""
    if (found := library(kind)) is None:
        return lambda data: int(data.sum(dtype=np.uint64))
    ffi, lib = found.ffi, found.lib
    return lambda data: int(lib.colibri_crc32c(0, ffi.from_buffer("uint8_t[]", data), data.size))


class User:
    """One thread's random course."""

    def __init__(self, records: Records, store: ExpertStore, kind: str, number: int) -> None:
        self.records, self.store, self.checksum = records, store, checksum(kind)
        self.random = np.random.default_rng(number)
        self.requests = 0

    def run(self) -> None:
        for _ in range(TURNS):
            layer = self.records.index.layers[self.random.integers(2)].layer
            self.store.prefetch(layer, self.some(4), self.random.choice(list(Origin)))
            self.use(layer, np.sort(self.some(MOST)))
            if self.random.random() < 0.1:
                self.store.retire(self.records.record_nbytes)
            elif self.random.random() < 0.1:
                self.store.take_back(1 << 30)

    def some(self, most: int) -> np.ndarray:
        count = self.random.integers(1, most + 1)
        return self.random.choice(EXPERTS, count, replace=False).astype(np.int32)

    def use(self, layer: int, experts: np.ndarray) -> None:
        row = self.records.index.position[layer]
        self.requests += len(experts)
        with self.store.lease(layer, experts) as slots:
            for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
                self.store.table.wait(slot)
                if self.store.table.states[slot] != READY:
                    assert isinstance(self.store.failure(slot), ReadError)
                    assert expert == 0  # the one that is damaged
                    continue
                wanted = self.records.parts[row, expert][0]
                start = int(self.store.table.parts[slot, 0])
                found = self.store.table.arena[start : start + wanted.size]
                assert self.checksum(found) == self.checksum(wanted), (layer, expert)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damaged", [False, True])
def test_threads_share_a_store(tmp_path: Path, kind: str, damaged: bool) -> None:
    records = container_model(tmp_path, get_format("int8-g32"), 2, EXPERTS)
    if damaged:
        for path in records.index.files:
            body = bytearray(path.read_bytes())
            body[4096] ^= 1
            path.write_bytes(body)
    config = ReaderConfig(block=4096)
    store = open_store(
        records.index,
        [USERS * MOST + 2],
        library=library(kind),
        num_threads=3,
        reader=config,
        active=USERS * MOST,
    )
    users = [User(records, store, kind, number) for number in range(USERS)]
    with ThreadPoolExecutor(USERS) as threads:
        for done in [threads.submit(user.run) for user in users]:
            done.result()
    assert not store._leases.any()
    for slot in np.flatnonzero(store.table.states == LOADING).tolist():
        store.table.wait(slot)
    stats = store.stats
    assert stats.requests == stats.hits + stats.misses == sum(user.requests for user in users)
    assert stats.records == stats.misses + stats.prefetched - stats.withdrawn
    assert stats.bytes_read == stats.records * records.record_nbytes
    assert (stats.failed > 0) == damaged
    store.take_back(1 << 30)
    with store.lease(1, np.arange(1, USERS * MOST + 3, dtype=np.int32)) as slots:
        assert len(set(slots.tolist())) == USERS * MOST + 2  # no slot was lost
    store.close()
