"""The trace of a run: it parses, spans nest, and its reads are all that was read."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from colibri import LLM
from colibri.errors import SettingsError
from tests.unit.memory.records import KINDS

PROMPT = [17, 200, 3, 88, 45, 9]
KERNELS = ["reference", "native"] if "native" in KINDS else ["reference"]


def traced(model: Path, path: Path, **settings: Any) -> tuple[list[int], LLM]:
    with LLM.open(model, profile=path, prefetch="on", **settings) as llm:
        return list(llm.generate(PROMPT, max_tokens=6, ignore_eos=True).token_ids), llm


def events(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event]


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_a_run_leaves(tiny: Path, tmp_path: Path, kernels: str) -> None:
    path = tmp_path / "trace.json"
    tokens, _ = traced(tiny, path, kernels=kernels, expert_slots=8, warm_start=False)
    with LLM.open(tiny, kernels=kernels, expert_slots="100%") as llm:
        assert list(llm.generate(PROMPT, max_tokens=6, ignore_eos=True).token_ids) == tokens
    found = events(path)
    run = next(event["args"] for event in found if event["name"] == "run")

    reads = [event for event in found if event["ph"] == "b"]
    ends = {event["id"]: event["ts"] for event in found if event["ph"] == "e"}
    landed = [event for event in reads if event["args"]["outcome"] == "landed"]
    assert len(ends) == len(reads)
    assert all(ends[event["id"]] >= event["ts"] > 0 for event in reads)
    assert len(landed) == run["records"] == run["misses"] + run["prefetched"] - run["withdrawn"]
    assert sum(event["args"]["bytes"] for event in landed) == run["bytes_read"] > 0

    spans = [event for event in found if event["ph"] == "X"]
    nest(spans)
    names = defaultdict(int)
    for event in spans:
        names[event["name"]] += 1
    assert names["forward"] == names["head_step"] == 6
    assert names["moe_step"] >= 6 * run_layers(found) > 0
    assert {event["cat"] for event in spans} >= {"kernel", "python"}
    if kernels == "reference":  # native ones write down only what had not landed yet
        assert names["wait"] > 0  # 8 slots are far from all


def run_layers(found: list[dict[str, Any]]) -> int:
    return len({event["args"]["layer"] for event in found if event["name"].endswith(": MoE")})


def nest(spans: list[dict[str, Any]]) -> None:
    """Of two spans of a thread, one holds the other or they do not touch."""
    tracks = defaultdict(list)
    for event in spans:
        begin = ns(event["ts"])
        tracks[event["tid"]].append((begin, begin + ns(event["dur"]), event))
    for track in tracks.values():
        around: list[tuple[int, int, dict[str, Any]]] = []
        for begin, end, event in sorted(track, key=lambda each: (each[0], -each[1])):
            while around and around[-1][1] <= begin:
                around.pop()
            assert not around or end <= around[-1][1], (event, around[-1][2])
            if event["cat"] == "wait":
                assert any(each["name"] == "moe_step" for _, _, each in around)
            around.append((begin, end, event))


def test_a_file_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"profile is .*name a file that can be written"):
        LLM.open(tiny, profile=tmp_path / "none" / "trace.json")


def test_what_a_killed_run_leaves_can_be_read(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM.open(tiny, profile=path, expert_slots=8) as llm:
        llm.generate(PROMPT, max_tokens=2, ignore_eos=True)
        llm._model.spans._file.flush()  # type: ignore[union-attr]
        text = path.read_text()
    json.loads(text.rstrip().rstrip(",") + "]")
    assert "forward" in text


def test_without_it_nothing_is_wrapped(tiny: Path) -> None:
    with LLM.open(tiny, expert_slots=8) as llm:
        model = llm._model
        assert model is not None
        assert model.spans is None
        assert model.kernels is llm.prepared.kernels
        assert "Traced" not in type(model.store._reader).__name__
        assert getattr(model.kernels, "waits", None) is None
