"""Every family has random checkpoints of every shape, and they open."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from colibri.checkpoint.index import Checkpoint
from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.models.blueprint import Blueprint
from colibri.models.description import Description
from colibri.models.family import Family
from colibri.models.generate import generate, shape_config, shape_names
from tests.tiny import PLAIN, SPARSE, each_family

ROOT = Path(__file__).parents[3]


@each_family
@pytest.mark.parametrize("fmt", ["bf16", "int8-g32"])
def test_a_tiny_checkpoint_passes_the_census(family: Family, fmt: str, tmp_path: Path) -> None:
    config = shape_config(family, "tiny")
    generate(tmp_path / "to", config, experts=fmt, dense="int4-g64")
    description = Description.of(Checkpoint.open(tmp_path / "to"))
    coded = ["int8-g32"] if family in SPARSE else []
    wanted = ["bf16"] if fmt == "bf16" else [*coded, "int4-g64", "bf16"]
    assert list(description.formats()) == wanted
    assert json.loads((tmp_path / "to" / "config.json").read_text())["dtype"] == "bfloat16"


@each_family
@pytest.mark.parametrize("spelling", ["per-expert", "w1w3w2", "fused"])
def test_every_spelling_passes_the_census(family: Family, spelling: str, tmp_path: Path) -> None:
    config = shape_config(family, "tiny", 2)
    generate(tmp_path / "to", config, experts="f32", spelling=spelling, shards=2)
    found = Description.of(Checkpoint.open(tmp_path / "to")).experts.layers
    assert bool(found) == (family in SPARSE)


@each_family
@pytest.mark.parametrize("shape", shape_names())
def test_every_shape_is_a_config_of_every_family(family: Family, shape: str) -> None:
    blueprint = Blueprint.of(shape_config(family, shape, 3))
    assert blueprint.config.num_hidden_layers == 3
    assert blueprint.expert_layers() or family not in SPARSE


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="known are tiny, demo"):
        shape_config(PLAIN, "enormous")


def test_the_tool_writes_a_model(tmp_path: Path) -> None:
    command = [sys.executable, "tools/make_checkpoint.py", str(tmp_path / "to"), "--shape", "tiny"]
    subprocess.run([*command, "--layers", "2"], cwd=ROOT, check=True, capture_output=True)
    description = Description.of(Checkpoint.open(tmp_path / "to"))
    assert next(description.formats()) == "int4-g64"
    again = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert again.returncode == 3
    assert "finished container" in again.stderr
    assert "Traceback" not in again.stderr
    command[2] = str(tmp_path / ("x" * 300))
    barred = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (barred.returncode, barred.stderr.count("\n")) == (74, 1)
    assert "Traceback" not in barred.stderr


@pytest.mark.parametrize("fmt", ["int4-g64", "bf16"])
def test_a_directory_that_cannot_be_written_is_refused(
    fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "os.access", lambda path, mode: not mode & os.W_OK or Path(path) != tmp_path
    )
    with pytest.raises(CheckpointError, match="cannot be written to"):
        generate(tmp_path / "to", PLAIN.tiny_config(), experts=fmt)
    assert not list(tmp_path.iterdir())
