"""Tiny benches: that every figure is there and makes sense, not how large it is."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from colibri.errors import RequestError
from colibri.formats import FORMATS
from colibri.kernels.api import Activations
from colibri.lab import bench_matrix
from colibri.lab.bench_config import LEAST_WORKING_SET, KernelBench, parse_shape
from colibri.lab.bench_kernels import SCHEMA, bench_kernels
from colibri.lab.bench_result import Measured, Result, with_cells
from colibri.settings import Settings

TINY = KernelBench(
    formats=("int4-g64", "bf16"),
    error_formats=("int4-g128",),
    num_tokens=(1, 4),
    shapes=(parse_shape("64x128"),),
    pairs=2,
    working_set_bytes=4 << 20,
    turn_s=0.001,
    num_positions=128,
)
FIELDS = [
    *("op", "shape", "format", "activations", "n", "rows", "columns", "threads", "bytes_per_s"),
    *("share_of_limit", "share_of_parts", "gops", "error_rms", "interval"),
    *("peer_ratio", "peer_interval"),
]


def test_a_whole_bench() -> None:
    stages: list[tuple[int, int]] = []
    report = bench_kernels(
        TINY, Settings(threads=1), lambda _, done, all: stages.append((done, all))
    )
    shown = json.loads(json.dumps(report.as_dict()))
    assert shown["schema"] == SCHEMA
    assert shown["ceilings"]["dram_read_bytes_per_s"] > 0
    assert shown["settings"]["threads"] == 1
    results = shown["results"]
    assert all(list(row) == FIELDS for row in results)
    matrices = [row for row in results if row["op"] == "matrix" and row["rows"] and row["gops"]]
    wanted = {("int4-g64", "int16"), ("int4-g64", "int8"), ("bf16", "float32")}
    assert {(row["format"], row["activations"]) for row in matrices} == wanted
    assert {(row["n"], row["rows"], row["columns"]) for row in matrices} == {
        (n, *shape) for n in (1, 4) for shape in ((64, 128), (128, 64))
    }
    assert len(matrices) == 12
    assert {row["op"] for row in results} == {"matrix", "moe_step", "attention", "latent"}
    assert stages[-1] == (9, 9)


def test_values_make_sense() -> None:
    report = bench_kernels(TINY, Settings(threads=1))
    errors = {"int16": 1e-4, "int8": 2e-2, "float32": 1e-5}
    for row in report.results:
        if row["format"] == "int4-g128":
            assert 0 < row["error_rms"] <= 1.5 * errors[row["activations"]]
            assert row["interval"] is row["share_of_limit"] is row["bytes_per_s"] is None
            continue
        low, high = row["interval"]
        judged = row["share_of_parts"] or row["share_of_limit"]
        assert 0 < low <= judged <= high or row["rows"] is None
        assert row["bytes_per_s"] > 0
        if row["op"] == "matrix":
            assert 0 < row["error_rms"] <= errors[row["activations"]]
        assert (row["share_of_parts"] is not None) == (row["op"] == "moe_step")
        assert row["peer_ratio"] is None


def test_a_peer_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peer:
        count = 3

        def __init__(self) -> None:
            self.prepared: list[tuple[int, int]] = []

        def prepare(self, x: np.ndarray, each: int) -> None:
            self.prepared.append((len(x), each))

        def turn(self) -> float:
            return 1e-3

    monkeypatch.setattr(bench_matrix, "_PEER_PAUSE_S", 0.0)
    kernels = {coding: bench_matrix.BenchKernels(1, coding) for coding in (Activations.INT16,)}
    kernels[Activations.INT16].reserve(bench_matrix.limits_of([(64, 128)], 4))
    weights = bench_matrix.DistinctMatrices(
        np.zeros(1 << 20, np.uint8), FORMATS["int4-g64"], (64, 128), np.random.default_rng(0)
    )
    bench = replace(TINY, activations=(Activations.INT16,))
    peer: Any = Peer()
    measured = list(bench_matrix.MatrixCell(bench, "x", weights, kernels, peer).measure())
    assert [n for n, _ in peer.prepared] == [1, 4]
    assert all(each <= 3 for _, each in peer.prepared)
    for item in measured:
        assert item.result.peer_ratio is not None
        assert item.result.peer_ratio > 1
        assert item.result.peer_interval is not None


def result(rows: int, **values: Any) -> Result:
    return Result(
        **{
            "op": "matrix",
            "shape": "x",
            "format": "bf16",
            "activations": "float32",
            "n": 1,
            "rows": rows,
            "columns": 64,
            "threads": 2,
            **values,
        }
    )


def measured(rows: int, share: float, **values: Any) -> Measured:
    rounds = np.full(7, share)
    return Measured(result(rows, share_of_limit=share, **values), rounds, rounds)


def test_a_cell_is_the_geometric_mean_over_shapes() -> None:
    first = measured(8, 0.5, error_rms=1e-5)
    second = measured(16, 0.72, error_rms=3e-5)
    found = list(with_cells([first, second, measured(8, 0.9, n=4)]))
    assert [row.rows for row in found] == [8, 16, None, 8]
    cell = found[2]
    assert cell.share_of_limit == pytest.approx(0.6)
    assert cell.interval == pytest.approx((0.6, 0.6))
    assert cell.error_rms == 3e-5
    assert (cell.shape, cell.columns, cell.peer_ratio) == (None, None, None)


def test_why_no_measurement() -> None:
    machine = {"last_level_cache_bytes": 32 << 20, "others_cpu_share": 0.0}
    assert KernelBench().why_no_measurement(machine, 1) == []
    few, small = TINY.why_no_measurement(machine, 1)[::-1]
    assert f"{LEAST_WORKING_SET:,}" in small
    assert "at least 7" in few
    large = {**machine, "last_level_cache_bytes": 1 << 30}
    assert "4,294,967,296" in KernelBench().why_no_measurement(large, 1)[0]
    assert "threads on" in KernelBench().why_no_measurement(machine, 9999)[0]
    busy = {**machine, "others_cpu_share": 0.5}
    assert "other programs took 50%" in KernelBench().why_no_measurement(busy, 1)[0]


def test_shapes() -> None:
    assert parse_shape("qwen3-30b-a3b").matrices() == ((768, 2048), (2048, 768))
    assert parse_shape("dense-4096").matrices() == ((4096, 4096),)
    assert parse_shape("8x16").matrices() == ((8, 16), (16, 8))
    for wrong in ("big", "8x", "0x8", "x", "8x-1"):
        with pytest.raises(RequestError, match="768x2048"):
            parse_shape(wrong)
