"""Texts are cut so that every token is foretold once, and foretold as the model does it whole."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri import LLM
from colibri.checkpoint.byte_tokenizer import write_byte_tokenizer
from colibri.errors import RequestError, SettingsError, TextError
from colibri.lab.eval_text import Cut, Window, _windows, log_probabilities, read_passage, surprise
from colibri.models.family import Family
from tests.tiny import PLAIN, each_family, write_tiny


@given(st.integers(2, 300), st.integers(0, 2), st.integers(2, 40), st.integers(1, 40))
def test_windows_foretell_every_token_once(length: int, start: int, size: int, stride: int) -> None:
    stride = min(stride, size if start else size - 1)
    ids, head = list(range(100, 100 + length)), list(range(start))
    foretold: list[int] = []
    for number, window in enumerate(_windows(ids, head, size, stride)):
        assert window.ids[:start] == head
        assert 1 <= window.first < len(window.ids) <= start + size
        if number:
            assert window.first >= start + size - stride or len(window.ids) < start + size
        foretold += window.ids[window.first :]
    assert foretold == ids[0 if start else 1 :]


@each_family
def test_logits_of_a_part_are_those_of_the_whole(family: Family, tmp_path: Path) -> None:
    model = write_tiny(tmp_path, family)
    ids = np.random.RandomState(3).randint(3, 200, 41).tolist()
    others = [*ids[:30], 7, 8, 9]
    with LLM.open(model, prefill_chunk=16) as llm:
        whole, other = llm.logits(ids), llm.logits(others)
        for first in (0, 1, 29):
            parts = list(llm.logits_from(ids, first, most_rows=7))
            assert max(map(len, parts)) <= 7
            assert np.array_equal(np.concatenate(parts), whole[first:])
        with llm.open_session() as session:  # two texts that begin alike
            for asked, expected in ((ids, whole), (others, other), (ids, whole)):
                found = np.concatenate(list(llm.logits_from(asked, 29, session=session)))
                assert np.array_equal(found, expected[29:])
                assert list(session.ids) == asked


def test_log_probabilities_are_normal(tmp_path: Path) -> None:
    with LLM.open(write_tiny(tmp_path, PLAIN)) as llm:
        window = Window(list(range(5, 40)), 10)
        expected = llm.logits(window.ids).astype(np.float64)[9:-1]
        found = list(log_probabilities(llm, window))
    targets = np.concatenate([targets for targets, _ in found])
    rows = np.concatenate([rows for _, rows in found])
    assert targets.tolist() == window.ids[10:]
    assert np.allclose(np.exp(rows).sum(axis=1), 1.0)
    assert np.allclose(rows - rows[:, :1], expected - expected[:, :1])
    assert np.allclose(surprise(targets, rows), -rows[np.arange(25), targets])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny(tmp_path_factory.mktemp("text"), PLAIN)
    write_byte_tokenizer(folder)
    return LLM.open(folder, context_length=128)


def test_a_passage_knows_its_sizes(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Grüße aus der Ferne. " * 20, encoding="utf-8")
    passage = read_passage(path, llm.prepared, Cut(context=64))
    assert passage.num_ids == passage.num_ids_of_file
    assert passage.num_bytes == path.stat().st_size
    short = read_passage(path, llm.prepared, Cut(tokens=50))
    assert (short.num_ids, short.num_ids_of_file) == (50, passage.num_ids)
    assert short.digest != passage.digest
    assert len(short.windows) == 1


@pytest.mark.parametrize(
    ("cut", "kind", "message"),
    [
        (Cut(context=129), SettingsError, "the context holds 128.*raise context_length"),
        (Cut(context=64, stride=65), RequestError, "65 apart.*stride of 1 to"),
        (Cut(context=64, stride=0), RequestError, "0 apart"),
    ],
)
def test_cuts_that_are_none(
    llm: LLM, tmp_path: Path, cut: Cut, kind: type[Exception], message: str
) -> None:
    (tmp_path / "text").write_text("some text")
    with pytest.raises(kind, match=message):
        read_passage(tmp_path / "text", llm.prepared, cut)


def test_texts_that_are_none(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"missing: No such file.*name a text file"):
        read_passage(tmp_path / "missing", llm.prepared, Cut())
    (tmp_path / "binary").write_bytes(b"text \xff")
    with pytest.raises(RequestError, match="byte 5 is no UTF-8"):
        read_passage(tmp_path / "binary", llm.prepared, Cut())
    (tmp_path / "empty").write_text("")
    with pytest.raises(RequestError, match="has 0 tokens"):
        read_passage(tmp_path / "empty", llm.prepared, Cut())


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    with LLM.open(write_tiny(tmp_path, PLAIN)) as llm, pytest.raises(TextError, match="tokenizer"):
        read_passage(tmp_path / "text", llm.prepared, Cut())
