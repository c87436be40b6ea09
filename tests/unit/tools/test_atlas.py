"""`tools/atlas.py` counts what routers chose."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.checkpoint.index import Checkpoint
from tests.architecture.sources import ROOT
from tools import atlas
from tools.demo import held_out

A, B = [[[8, 0, 0, 0]], [[2, 2, 2, 2]]], [[[8, 0, 0, 0]], [[20, 20, 20, 20]]]  # [D=2, L=1, E=4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A container with a tokenizer."""
    directory = tmp_path_factory.mktemp("atlas") / "model"
    tool = str(ROOT / "tools" / "make_checkpoint.py")
    subprocess.run(
        [sys.executable, tool, str(directory), "--shape", "tiny"], check=True, capture_output=True
    )
    return directory


@pytest.mark.parametrize("counts", [A, B], ids=["even", "one domain has more tokens"])
def test_domains_weigh_the_same(counts: list[list[list[int]]]) -> None:
    share = atlas.affinity(np.array(counts))
    assert share[:, 0, 0].tolist() == [0.8, 0.2]
    assert share[:, 0, 1:].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert atlas.heat(np.array(counts)).tolist() == [[2.5, 0.5, 0.5, 0.5]]


def test_an_expert_that_nobody_chose_has_no_affinity() -> None:
    share = atlas.affinity(np.array([[[1, 0]], [[3, 0]]]))
    assert share[:, 0].tolist() == [[0.5, 0], [0.5, 0]]


def test_the_table_names_the_experts_that_serve_most() -> None:
    rows = atlas.table(["x", "y"], [7], np.array(A), best=1).splitlines()
    assert rows[0] == "| domain | layer 7 |"
    assert rows[2:] == ["| x | 0 (80%) |", "| y | 1 (100%) |"]


def test_balance_of_an_even_and_of_a_lopsided_load() -> None:
    even = held_out.balance(np.full((3, 2, 4), 0.25))
    assert (even["mean_coefficient_of_variation"], even["max_over_mean"]) == (0, 1)
    assert even["domains_an_expert_serves"] == pytest.approx(3)
    own = held_out.balance(np.eye(4)[:, None, :])  # each domain has an expert of its own
    assert own["mean_coefficient_of_variation"] == 0
    assert own["within_domain_coefficient_of_variation"] == pytest.approx(3**0.5)
    assert own["domains_an_expert_serves"] == pytest.approx(1)


def test_windows_score_each_position_once() -> None:
    tokens = np.arange(5 * held_out.CONTEXT + 1).astype(np.uint16)
    rows = held_out.windows(tokens, 99)
    scored = np.concatenate([row[held_out.CONTEXT + 1 :] for row in rows])
    assert len(rows) == 4
    assert len(set(scored.tolist())) == scored.size
    assert held_out.windows(tokens, 2).shape == (2, 2 * held_out.CONTEXT + 1)


def test_the_command_writes_beside_a_model_that_still_opens(model: Path, tmp_path: Path) -> None:
    texts = {"one": "The bird sings. " * 20, "two": "0101010101" * 10}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    arguments = [f"{name}={tmp_path / name}" for name in texts]
    tool = [sys.executable, "-m", "tools.atlas", str(model), *arguments, "--tokens", "150"]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((model / "experts.json").read_text())
    assert found["schema"] == atlas.SCHEMA
    assert found["domains"] == ["one", "two"]
    files = {path.name for path in model.glob("*.safetensors")}
    assert found["model"].keys() == files
    for layer in found["layers"].values():
        counts = np.array(layer["counts"])  # [E, D]
        for d, name in enumerate(found["domains"]):
            assert counts[:, d].sum() == found["tokens"][name] * found["num_experts_per_tok"]
        used = counts.sum(1) > 0
        assert np.abs(np.array(layer["affinity"]).sum(1) - used).max() < 1e-3
        assert np.mean(layer["heat"]) == pytest.approx(1, abs=1e-3)
    assert Checkpoint.open(model).container is not None
    with LLM.open(model) as llm:
        assert llm.generate("The", max_tokens=1).completion_tokens == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere", "a=b"], "no such directory"), (["nowhere", "a"], "NAME=TEXTFILE")],
)
def test_refusals(arguments: list[str], message: str) -> None:
    tool = [sys.executable, "-m", "tools.atlas", *arguments]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode > 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
