import json
from pathlib import Path

import numpy as np
import pytest

from colibri.errors import NativeLibraryError, SettingsError
from colibri.kernels.reference import ReferenceKernels
from colibri.lab import bench_call as module
from colibri.lab.bench_call import SCHEMA, CallBench, bench_call
from colibri.models.generate import generate, shape_config
from colibri.settings import Settings
from tests.tiny import PLAIN


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("call") / "tiny"
    generate(directory, shape_config(PLAIN, "tiny"))
    return directory


def test_a_step_is_accounted_for(tiny: Path) -> None:
    report = bench_call(CallBench(steps=8), Settings(model=str(tiny), threads=1))
    shown = json.loads(json.dumps(report.as_dict()))
    assert shown["schema"] == SCHEMA
    assert shown["settings"]["threads"] == 1
    (row,) = shown["results"]
    assert 0 < row["native_s"] < row["step_s"]
    assert 0 < row["python_s"] < row["step_s"]
    assert 0 < row["python_cpu_s"] < row["step_s"]
    low, high = row["interval"]
    assert 0 < low <= row["python_share"] <= high < 1
    assert row["python_share_at_10_per_s"] == pytest.approx(10 * row["python_s"])
    # embed and head, and at least attention and feed-forward of every layer
    assert row["native_calls"] >= 2 + 2 * row["num_layers"]
    assert not any("native calls" in reason for reason in report.reasons)


def test_few_steps_are_no_measurement(tiny: Path) -> None:
    report = bench_call(CallBench(steps=2), Settings(model=str(tiny), threads=1))
    assert "at least 7" in report.reasons[0]


def test_steps_without_native_calls_are_no_measurement() -> None:
    steps = np.array([[100.0, 50.0, 40.0, 4.0]] * 7 + [[100.0, 0.0, 100.0, 0.0]])
    assert module._why_no_measurement(steps) == ["a step without native calls"]


def test_a_model_is_made_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "uses_bundled", lambda settings: False)
    monkeypatch.setattr(module, "_SHAPE", "tiny")
    with module._model(Settings()) as settings:
        assert settings.model is not None
        assert (Path(settings.model) / "config.json").is_file()
    assert not Path(settings.model).exists()


def test_only_native_kernels_are_told_apart() -> None:
    with (
        pytest.raises(SettingsError, match="all of it"),
        module._model(Settings(kernels="reference")),
    ):
        pass
    with pytest.raises(NativeLibraryError, match="there are none"):
        module._timed(ReferenceKernels())
