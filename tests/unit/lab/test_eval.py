"""Perplexity, divergence and tasks: against plain sums, and the same where they were stopped."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.checkpoint.byte_tokenizer import write_byte_tokenizer
from colibri.errors import RequestError, SettingsError
from colibri.lab import eval_kl as kl_module
from colibri.lab.envelope import Envelope
from colibri.lab.eval_kl import eval_kl
from colibri.lab.eval_ledger import Ledger
from colibri.lab.eval_ppl import eval_ppl
from colibri.lab.eval_tasks import continuation, eval_tasks, read_task
from colibri.lab.eval_text import Cut
from colibri.settings import Settings
from tests.tiny import PLAIN, write_tiny

CUT = Cut(context=48, stride=16)
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 2
QUESTIONS = [
    {"context": "one two", "choices": ["three", "a good deal more"], "answer": 0},
    {"context": "it is late ", "choices": ["now", "then", "never"], "answer": 2, "id": 7},
    {"context": "", "choices": ["alpha", "beta"], "answer": 1},
]


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody sees."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("eval"), PLAIN)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> Settings:
    return Settings.resolve({}, model=str(model), cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")
    return path


def leftovers(settings: Settings) -> list[str]:
    return [path.name for path in settings.cache.rglob("*") if path.is_file()]


def test_perplexity_is_that_of_plain_sums(settings: Settings, text: Path, model: Path) -> None:
    (row,) = eval_ppl([text], Cut(context=256), settings, silent).results
    with LLM.open(model, context_length=256) as llm:
        tokenizer = llm.prepared.tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode_prompt(TEXT)
        logits = llm.logits(ids).astype(np.float64)
    nll = np.log(np.exp(logits).sum(axis=1))[:-1] - logits[np.arange(len(ids) - 1), ids[1:]]
    assert row["scored"] == len(ids) - 1
    assert row["nll"] == pytest.approx(nll.mean())
    assert row["perplexity"] == pytest.approx(np.exp(nll.mean()))
    low, high = row["interval"]
    assert low <= row["perplexity"] <= high
    assert row["bits_per_byte"] == pytest.approx(nll.sum() / np.log(2) / len(TEXT))
    assert leftovers(settings) == []


def test_divergence_from_itself_is_nothing(settings: Settings, text: Path) -> None:
    (row,) = eval_kl([text], CUT, settings, settings, silent).results
    assert row["kl"] == row["kl_max"] == 0
    assert row["top1_agreement"] == row["perplexity_ratio"] == 1
    assert leftovers(settings) == []


def test_divergence_is_that_of_plain_sums(model: Path, settings: Settings, text: Path) -> None:
    coarse = Settings.resolve({}, model=settings.model, cache_dir=settings.cache_dir, kv="int8")
    (row,) = eval_kl([text], Cut(context=256), coarse, settings, silent).results
    rows = []
    for kv in ("auto", "int8"):
        with LLM.open(model, kv=kv, context_length=256) as llm:
            assert llm.prepared.tokenizer is not None
            logits = llm.logits(llm.prepared.tokenizer.encode_prompt(TEXT))[:-1].astype(np.float64)
        rows.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    expected = (np.exp(rows[0]) * (rows[0] - rows[1])).sum(axis=1)
    assert row["kl"] == pytest.approx(expected.mean(), rel=1e-3)
    assert 0 < row["interval"][0] <= row["kl"] <= row["interval"][1]
    assert row["top1_agreement"] == (rows[0].argmax(1) == rows[1].argmax(1)).mean()


def test_tasks_are_those_of_plain_sums(settings: Settings, task: Path, model: Path) -> None:
    (row,) = eval_tasks([task], settings, silent).results
    right = right_norm = 0
    with LLM.open(model) as llm:
        tokenizer = llm.prepared.tokenizer
        assert tokenizer is not None
        for question in read_task(task):
            sums = []
            for choice in question.choices:
                window = continuation(tokenizer, question.context, choice, " ")
                logits = llm.logits(window.ids).astype(np.float64)
                rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
                sums.append(
                    sum(rows[i - 1, window.ids[i]] for i in range(window.first, len(window.ids)))
                )
            right += int(np.argmax(sums) == question.answer)
            norm = np.divide(sums, [len(choice) for choice in question.choices])
            right_norm += int(norm.argmax() == question.answer)
    assert (row["questions"], row["acc"], row["acc_norm"]) == (3, right / 3, right_norm / 3)
    assert row["acc_stderr"] == pytest.approx(np.sqrt(row["acc"] * (1 - row["acc"]) / 2))


def test_where_context_ends_and_answer_begins(model: Path) -> None:
    with LLM.open(model) as llm:
        tokenizer = llm.prepared.tokenizer
        assert tokenizer is not None
        for context, choice, whole in (
            ("so", "it is", "so it is"),
            ("so ", "it is", "so it is"),
            ("so\n\n", "it is", "so\n\nit is"),
            ("so", " it is", "so it is"),
        ):
            window = continuation(tokenizer, context, choice, " ")
            start = tokenizer.encode_prompt("")
            assert window.ids == [*start, *tokenizer.encode(whole)]
            assert tokenizer.decode(window.ids[window.first :]).strip() == "it is"
        assert continuation(tokenizer, "", "alone", " ").ids[-5:] == tokenizer.encode("alone")


class StoppedError(Exception):
    """Somebody interrupts."""


class StopAt:
    """Progress that is interrupted in a stage's second step."""

    def __init__(self, stage: str) -> None:
        self.stage, self.steps = stage, 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.steps += stage.startswith(self.stage)
        if self.steps == 3:
            raise StoppedError


RUNS: dict[str, tuple[str, str, Callable[..., Envelope]]] = {
    "ppl": ("reading", "windows_resumed", lambda s, t, q, p: eval_ppl([t], CUT, s, p)),
    "kl-reference": (
        "reference",
        "windows_resumed",
        lambda s, t, q, p: eval_kl([t], CUT, s, s, p),
    ),
    "kl": ("comparing", "windows_resumed", lambda s, t, q, p: eval_kl([t], CUT, s, s, p)),
    "tasks": ("asking", "questions_resumed", lambda s, t, q, p: eval_tasks([q], s, p)),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_was_stopped_goes_on(name: str, settings: Settings, text: Path, task: Path) -> None:
    stage, resumed, run = RUNS[name]
    expected = run(settings, text, task, silent).results[0]
    with pytest.raises(StoppedError):
        run(settings, text, task, StopAt(stage))
    assert leftovers(settings)
    found = run(settings, text, task, silent).results[0]
    assert found[resumed] == (0 if name == "kl-reference" else 2)
    assert {**found, resumed: 0} == expected
    assert leftovers(settings) == []


def test_a_line_cut_short_is_done_again(tmp_path: Path) -> None:
    with Ledger(tmp_path, {"a": 1}) as ledger:
        ledger.add({"n": 0})
        ledger.add({"n": 1})
    ledger.path.write_text(ledger.path.read_text()[:-3])
    with Ledger(tmp_path, {"a": 1}) as again:
        assert again.found == [{"n": 0}]
        again.add({"n": 5})
        again.truncate(1)
        again.add({"n": 6})
    with Ledger(tmp_path, {"a": 1}) as last:
        assert last.found == [{"n": 0}, {"n": 6}]
    with Ledger(tmp_path, {"a": 2}) as other:
        assert other.found == []


def test_a_ledger_that_is_none_is_begun_anew(tmp_path: Path) -> None:
    with Ledger(tmp_path, {"a": 1}) as ledger:
        ledger.add({"n": 0})
    ledger.path.write_text("what is this\n{\n")
    with Ledger(tmp_path, {"a": 1}) as again:
        assert again.found == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"cache_dir: .*file.*name a directory"):
        Ledger(tmp_path / "file" / "eval", {})


def test_a_disk_that_is_too_small(
    settings: Settings, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kl_module, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(SettingsError, match=r"predictions take .*--tokens 1\b.*cache_dir"):
        eval_kl([text], CUT, settings, settings, silent)


def test_two_vocabularies_cannot_be_compared(
    settings: Settings, text: Path, tmp_path: Path
) -> None:
    other = write_tiny(tmp_path / "other", PLAIN, vocab_size=600)
    write_byte_tokenizer(other)
    reference = Settings.resolve({}, model=str(other), cache_dir=settings.cache_dir)
    with pytest.raises(RequestError, match="different tokens"):
        eval_kl([text], CUT, settings, reference, silent)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: is no JSON"),
        ("[1]", "line 1: is list"),
        ('{"context": 1}', "context is 1"),
        ('{"context": "", "choices": ["a"], "answer": 0}', "choices are"),
        ('{"context": "", "choices": ["a", ""], "answer": 0}', "choices are"),
        ('{"context": "", "choices": ["a", "b"], "answer": 2}', "answer is 2.*0 to 1"),
        ('{"context": "", "choices": ["a", "b"], "answer": true}', "answer is True"),
        ("", "holds no question"),
    ],
)
def test_lines_that_are_no_questions(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "task").write_text(line)
    with pytest.raises(RequestError, match=message):
        read_task(tmp_path / "task")


def test_a_question_that_does_not_fit(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"context": "x" * 200, "choices": ["a", "b"], "answer": 0}))
    settings = Settings.resolve({}, model=str(model), context_length=64, cache_dir=str(tmp_path))
    with pytest.raises(RequestError, match=r"question 1: has 2.. tokens, the context holds 64"):
        eval_tasks([path], settings, silent)
