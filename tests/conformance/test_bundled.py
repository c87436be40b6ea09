"""The model that comes with the package; while it is not there, one made the same way."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import LLM
from colibri.checkpoint.index import Checkpoint
from colibri.checkpoint.verify import verify_container
from colibri.llm.location import BUNDLED
from colibri.models.convert import convert_model
from colibri.models.description import Description
from tests.architecture.sources import ROOT

IS_THERE = (BUNDLED / "colibri.json").is_file()
MOST_BYTES = 20_000_000
TEXT = "And it came to pass in those days, that the king"


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if IS_THERE:
        return BUNDLED
    folder = tmp_path_factory.mktemp("bundled")
    tool = str(ROOT / "tools" / "make_checkpoint.py")
    command = [sys.executable, tool, str(folder / "from"), "--shape", "tiny"]
    subprocess.run([*command, "--format", "bf16"], check=True, capture_output=True)
    convert_model(folder / "from", folder / "to", dense="int8-g64")
    return folder / "to"


def test_a_quarter_of_its_experts_gives_the_same_bits(bundled: Path) -> None:
    logits: list[np.ndarray] = []
    replies: list[list[int]] = []
    for slots in ("25%", "100%"):
        with LLM.open(bundled, expert_slots=slots) as llm:
            logits.append(llm.logits(llm.encode(TEXT)))
            reply = llm.generate(TEXT, max_tokens=24, seed=1, ignore_eos=True)
            replies.append(reply.token_ids)
            stats = llm.metrics().experts
        assert stats.slack_bytes == 0
    assert np.array_equal(*logits)
    assert replies[0] == replies[1]


def test_records_are_what_was_written(bundled: Path) -> None:
    container = Checkpoint.open(bundled).container
    assert container is not None
    assert verify_container(container).num_records == sum(container.manifest.num_experts.values())


def test_each_record_is_one_aligned_read(bundled: Path) -> None:
    index = Description.of(Checkpoint.open(bundled)).experts
    for layout in index.layers:
        for expert in range(layout.num_experts):
            (read,) = index.reads(layout.layer, expert)
            assert read.offset % 4096 == read.nbytes % 4096 == 0
            assert read.nbytes == layout.record_nbytes


def test_it_is_small(bundled: Path) -> None:
    assert sum(path.stat().st_size for path in bundled.glob("[!.]*")) <= MOST_BYTES


if IS_THERE:

    @pytest.fixture(scope="module")
    def figures() -> dict[str, Any]:
        return json.loads((BUNDLED / "card.json").read_text(encoding="utf-8"))

    def test_figures_and_atlas_are_those_of_these_weights(figures: dict[str, Any]) -> None:
        container = Checkpoint.open(BUNDLED).container
        assert container is not None
        hashes = {name: record.sha256 for name, record in container.manifest.files.items()}
        experts = json.loads((BUNDLED / "experts.json").read_text(encoding="utf-8"))
        assert figures["files"] == experts["model"] == hashes
        assert experts["domains"] == list(figures["held_out"])
        card = (BUNDLED / "MODEL_CARD.md").read_text(encoding="utf-8")
        assert f"{figures['mean_kl']:.4f} nats" in card
        assert all(f"| {name} |" in card for name in figures["sources"])

    def test_the_figures_hold_what_was_asked(figures: dict[str, Any]) -> None:
        assert figures["mean_kl"] <= 0.02
        assert len(figures["held_out"]) >= 6
        for row in figures["held_out"].values():
            assert row["loss"]["container"] < row["loss"]["ngram"]
        samples, knocked = figures["samples"], figures["knock_out"]
        assert samples["number"] >= 50
        assert samples["right"] >= 0.8 * samples["number"]
        assert knocked["won"] >= 0.8 * knocked["of"]

    def test_it_continues_text_of_three_kinds() -> None:
        prompts = {"bible": TEXT, "python": "    def __init__(self, name", "german": "Das Paket"}
        with LLM.open() as llm:
            assert llm.prepared.directory == BUNDLED
            assert not llm.has_chat_template
            texts = [
                llm.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True).text
                for prompt in prompts.values()
            ]
        assert len(set(texts)) == len(texts)
        assert "self." in (texts[1] or "")
