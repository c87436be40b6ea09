from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.text import Detokenizer, Tokenizer
from tests.unit.text.samples import NAMES, golden, sentencepiece_model, tiny_backend, tokenizer

BACKEND = tiny_backend()


def stream(subject: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(subject, skip_special=skip_special)
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("name", NAMES)
def test_streamed_text_is_the_whole_text(name: str) -> None:
    subject = tokenizer(name)
    for case in golden(name):
        pieces = stream(subject, case["ids"], skip_special=False)
        assert "".join(pieces) == case["decoded"]
        if "\ufffd" not in case["decoded"]:
            assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(stream(subject, case["ids"])) == subject.decode(case["ids"])


@pytest.mark.parametrize("name", NAMES)
def test_random_ids(name: str) -> None:
    subject = tokenizer(name)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(0, subject.vocab_size + 5), max_size=24), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        pieces = stream(subject, ids, skip_special=skip)
        assert "".join(pieces) == subject.decode(ids, skip_special=skip)

    check()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, BACKEND.get_vocab_size() - 1), max_size=24), st.booleans())
def test_random_ids_decode_as_the_library_does(ids: list[int], skip: bool) -> None:
    decoded = BACKEND.decode(ids, skip_special_tokens=skip)
    assert tokenizer("tiny").decode(ids, skip_special=skip) == decoded


def test_half_characters_are_held_back() -> None:
    subject = tokenizer("tiny")
    ids = subject.encode("a\U0001f642b")
    assert len(ids) == 6
    assert stream(subject, ids) == ["a", "", "", "", "\U0001f642", "b", ""]
    assert stream(subject, ids[:3]) == ["a", "", "", "\ufffd"]
    assert stream(subject, [*ids[:3], ids[5]]) == ["a", "", "", "\ufffdb", ""]


def test_special_tokens_do_not_split_characters() -> None:
    subject = tokenizer("tiny")
    first, second = subject.encode("é")
    assert stream(subject, [first, 2, second]) == ["", "", "é", ""]
    assert stream(subject, [2], skip_special=False) == ["<|im_end|>", ""]


def test_only_the_first_blank_of_sentencepiece_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(["▁a", "▁", "a"]))
    subject = Tokenizer.load(tmp_path)
    assert subject is not None
    ids = subject.encode("a a  a")
    assert ids == [259, 259, 260, 259]
    assert stream(subject, [1, *ids]) == ["", "a", " a", " ", " a", ""]
    assert stream(subject, [3 + 0xE2, 3 + 0x82, 3 + 0xAC, 260]) == ["", "", "€", " ", ""]
