"""The driver itself is built by hand (benchmarks/README.md); here a stand-in takes its place."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from cffi import FFI

from colibri.errors import RequestError
from colibri.lab.peer import PeerLibrary, PeerMatrices

SHAPE = (4, 8)


class Driver:
    """What benchmarks/ggml_peer.c does, in NumPy."""

    def __init__(self, ffi: FFI, error: float = 0.0) -> None:
        self.ffi, self.error = ffi, error
        self.weights = np.arange(32, dtype=np.float32).reshape(SHAPE)
        self.ran: list[tuple[int, int]] = []
        self.closed = 0

    def peer_open(self, rows: int, columns: int, count: int, threads: int) -> object:
        self.count = count
        return "peer" if count else None

    def peer_prepare(self, peer: object, n: int, each: int, pointer: Any) -> int:
        self.x = np.frombuffer(self.ffi.buffer(pointer), np.float32).reshape(n, -1).copy()
        return -(-self.count // each)

    def peer_run(self, peer: object, graph: int, each: int) -> int:
        self.ran.append((graph, each))
        return min(each, self.count - graph * each)

    def peer_output(self, peer: object, graph: int, pointer: Any) -> None:
        self._write(pointer, (1 + self.error) * (self.x @ self.weights.T))

    def peer_weights(self, peer: object, pointer: Any) -> None:
        self._write(pointer, self.weights)

    def peer_close(self, peer: object) -> None:
        self.closed += 1

    def _write(self, pointer: Any, values: np.ndarray) -> None:
        self.ffi.buffer(pointer)[:] = np.ascontiguousarray(values, np.float32).tobytes()


def library(error: float = 0.0) -> tuple[Driver, PeerLibrary]:
    ffi = FFI()
    driver = Driver(ffi, error)
    return driver, cast(PeerLibrary, SimpleNamespace(ffi=ffi, lib=driver))


def test_turns_go_around() -> None:
    driver, loaded = library()
    with PeerMatrices(loaded, SHAPE, 5, 2) as peer:
        peer.check()
        driver.ran.clear()
        peer.prepare(np.ones((3, 8), np.float32), 2)
        assert all(peer.turn() > 0 for _ in range(4))
    assert driver.ran == [(0, 2), (1, 2), (2, 2), (0, 2)]
    assert driver.closed == 1


def test_a_peer_that_computes_something_else() -> None:
    _, loaded = library(error=0.1)
    with PeerMatrices(loaded, SHAPE, 5, 2) as peer, pytest.raises(RequestError, match="off by 10%"):
        peer.check()


def test_a_peer_that_refuses() -> None:
    _, loaded = library()
    with pytest.raises(RequestError, match="cannot make 0 repacked Q4_0 matrices"):
        PeerMatrices(loaded, SHAPE, 0, 2)


def test_no_driver(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no driver of the peer"):
        PeerLibrary(tmp_path / "nowhere.so")
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(RequestError, match="no driver of the peer"):
        PeerLibrary(text)
