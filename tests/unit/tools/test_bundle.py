"""`train_demo.py bundle` over a small random model in the place of the trained one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from colibri.checkpoint.index import Checkpoint
from tests.architecture.sources import ROOT
from tools import atlas
from tools.demo import bundle, card, corpus, held_out

EVALUATION = {
    "training": {"counters": [3, 60.0, 24576], "recipe": {"balance": 0.02, "seed": 1}},
    "knock_out": {"pairs": 10, "won": 7, "of": 8},
    "samples": {"number": 50, "right": 44, "right_for_real_text": 49},
}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What corpus, training, export and evaluation leave behind."""
    monkeypatch.setattr(held_out, "CONTEXT", 16)
    folder = tmp_path / "work"
    tool = str(ROOT / "tools" / "make_checkpoint.py")
    command = [sys.executable, tool, str(folder / "export-f32"), "--shape", "tiny"]
    command += ["--format", "f32", "--dense", "f32"]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "tokens").mkdir()
    rng = np.random.default_rng(0)
    for domain in corpus.DOMAINS:
        for part in ("train", "heldout"):
            tokens = rng.integers(0, 200, 100).astype(np.uint16)
            np.save(folder / f"tokens/{domain}.{part}.npy", tokens)
    sizes = {"tokens": 100}
    source = {"title": "a book", "packages": ["deb:x"], "licence": "public domain"}
    source |= {"train": sizes, "heldout": sizes}
    (folder / "corpus.json").write_text(json.dumps(dict.fromkeys(corpus.DOMAINS, source)))
    (folder / "evaluation.json").write_text(json.dumps(EVALUATION))
    (folder / "checkpoint.pt").touch()
    os.utime(folder / "checkpoint.pt", (1, 1))
    return folder


def test_one_command_makes_the_folder(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MOST_KL", 100.0)
    out = tmp_path / "bundled"
    out.mkdir()
    (out / "old").touch()
    bundle.bundle(work, out, 2, 50)
    assert not (out / "old").exists()
    container = Checkpoint.open(out).container
    assert container is not None
    hashes = {name: record.sha256 for name, record in container.manifest.files.items()}
    figures = json.loads((out / card.FIGURES).read_text())
    experts = json.loads((out / atlas.FILE_NAME).read_text())
    assert figures["files"] == experts["model"] == hashes
    assert figures["formats"] == {"experts": "int4-g64", "dense": "int8-g64"}
    assert list(figures["held_out"]) == experts["domains"] == list(corpus.DOMAINS)
    for row in figures["held_out"].values():
        assert row["scored_tokens"] == 2 * 16
        assert row["kl"] > 0
        for kind, loss in row["loss"].items():
            assert row["perplexity"][kind] == pytest.approx(np.exp(loss))
    text = (out / card.CARD).read_text()
    for part in (f"{figures['mean_kl']:.4f}", "7 of 8", "44 of 50", "a book", "is 0.02"):
        assert part in text


def test_equal_weights_do_not_diverge(work: Path) -> None:
    rows = {"x": held_out.windows(np.load(work / "tokens/bible.heldout.npy"), 2)}
    found = bundle.measure(work / "export-f32", work / "export-f32", rows)
    assert found.mean_kl == 0
    assert found.trained == found.container
    assert found.counts.sum() == 2 * 32 * found.counter.num_experts_per_tok * len(
        found.counter.layers
    )


def test_what_costs_too_much_is_not_bundled(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MOST_BYTES", 10)
    with pytest.raises(SystemExit, match="no format"):
        bundle.bundle(work, tmp_path / "out", 1, 50)
    assert not (tmp_path / "out").exists()
