"""What a running model writes down is what `coli sim` reads."""

import json
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.errors import RequestError, SettingsError
from colibri.kernels.api import Routing
from colibri.lab.synthetic import Routing as Recipe
from colibri.lab.synthetic import make_trace
from colibri.lab.trace import halves, joined, read_trace
from tests.tiny import PLAIN, write_tiny

IDS = np.random.RandomState(5).randint(3, 512, 21).astype(np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("trace"), PLAIN)


def test_prefill_and_decode_are_written_down(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    seen: dict[int, list[np.ndarray]] = {}

    def keep(layer: int, routing: Routing) -> None:
        seen.setdefault(layer, []).append(routing.ids.copy())

    with LLM.open(model, expert_slots="100%", prefill_chunk=8, route_trace=path) as llm:
        new = llm.generate(IDS, max_tokens=6, temperature=0, ignore_eos=True).token_ids
        record_bytes = llm.plan().record_bytes
    with LLM.open(model, expert_slots="100%", prefill_chunk=64) as llm:
        llm.logits([*IDS, *new[:-1]], routes=keep)
    trace = read_trace(path)
    layers = sorted(seen)
    assert (trace.num_layers, trace.record_bytes) == (len(layers), record_bytes)
    assert np.unique(trace.passes).tolist() == list(range(3 + 5))
    for row, layer in enumerate(layers):
        own = trace.rows == row
        assert np.array_equal(trace.ids[own], np.concatenate(seen[layer]))
        assert trace.positions[own].tolist() == list(range(26))
        assert trace.tokens[own].tolist() == [*IDS.tolist(), *new[:-1]]
    assert (np.diff(trace.weights, axis=1) <= 0).all()


def test_tracing_changes_nothing_and_sees_teacher_forcing(model: Path, tmp_path: Path) -> None:
    with LLM.open(model) as llm:
        expected = llm.logits(IDS)
    calls: list[int] = []
    with LLM.open(model, route_trace=tmp_path / "routes.jsonl") as llm:
        found = llm.logits(IDS, routes=lambda layer, routing: calls.append(layer))
    assert np.array_equal(found, expected)
    trace = read_trace(tmp_path / "routes.jsonl")
    assert len(calls) == trace.num_layers
    assert len(trace.rows) == len(IDS) * trace.num_layers


def test_a_file_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"route_trace is .*nowhere.*name a file"):
        LLM.open(model, route_trace=tmp_path / "nowhere" / "file")


HEAD = {"route_trace": 1, "layers": [2, 5], "num_experts": 4, "num_experts_per_tok": 2}
LINES = [[0, 0, 9, 2, [3, 1], [0.6, 0.4]], [0, 1, 8, 2, [1, 0], [0.6, 0.4]]]
LINES += [[0, 0, 9, 5, [2, 1], [0.6, 0.4]], [0, 1, 8, 5, [0, 1], [0.6, 0.4]]]
LINES += [[1, 2, 7, 2, [0, 2], [0.6, 0.4]], [1, 2, 7, 5, [3, 0], [0.6, 0.4]]]


def written(folder: Path, *lines: object, head: object = HEAD) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    return path


def test_leases_by_token_and_by_pass(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, *LINES))
    by_token = [keys.tolist() for keys in trace.leases("token")]
    assert by_token == [[1, 3], [5, 6], [0, 1], [4, 5], [0, 2], [4, 7]]
    by_pass = [keys.tolist() for keys in trace.leases("pass")]
    assert by_pass == [[0, 1, 3], [4, 5, 6], [0, 2], [4, 7]]


def test_halves_and_what_is_joined(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, *LINES))
    first, second = halves(trace)
    assert [keys.tolist() for keys in second.leases()] == [[0, 2], [4, 7]]
    both = joined([first, second, first])
    assert len(both.rows) == 10
    assert np.unique(both.passes).tolist() == [0, 1, 2]
    assert both.leases()[:6] != []
    again = joined(list(halves(make_trace(Recipe(num_tokens=31)))))
    whole = make_trace(Recipe(num_tokens=31))
    assert np.array_equal(again.ids, whole.ids)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no tokens"),
        ([LINES[0], [0, 0, 9, 3, [3, 1], [0.6, 0.4]]], r"line 3: wanted \[pass.*layers \[2, 5\]"),
        ([[0, 0, 9, 2, [3, 3], [0.6, 0.4]]], "line 2: wanted"),
        ([[0, 0, 9, 2, [3, 4], [0.6, 0.4]]], "experts below 4"),
        ([[0, 0, 9, 2, [3], [0.6]]], "line 2: wanted"),
        ([[0, 0, 9, 2, [3, 1]]], "line 2: wanted"),
        ([{"a": 1}], "line 2: wanted"),
        ([3], "line 2: wanted"),
    ],
)
def test_lines_that_cannot_be(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_trace(written(tmp_path, *lines))


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="another form"):
        read_trace(written(tmp_path, head={"route_trace": 2}))
    with pytest.raises(RequestError, match="line 1 lacks layers"):
        read_trace(written(tmp_path, head={"route_trace": 1}))
    with pytest.raises(RequestError, match="nowhere"):
        read_trace(tmp_path / "nowhere")
    path = written(tmp_path, *LINES)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RequestError, match="line 7 is no JSON: the file is damaged or cut short"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="is no route trace"):
        read_trace(path)
