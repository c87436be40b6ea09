import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.errors import TextError
from colibri.text import Tokenizer
from colibri.text.files import SideFiles
from colibri.text.vocabulary import load_vocabulary
from tests.unit.text.samples import proto, sentencepiece_model

PIECES = ["hi", "▁hi", "</", "s>", "▁", "h", "i", "<", "/", "s", ">"]
ID = {piece: 259 + i for i, piece in enumerate(PIECES)}


def load(directory: Path, config: dict[str, object] | None = None) -> Tokenizer:
    (directory / "tokenizer.model").write_bytes(sentencepiece_model(PIECES))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    subject = Tokenizer.load(directory)
    assert subject is not None
    return subject


def test_cuts_by_score_with_a_blank_in_front(tmp_path: Path) -> None:
    subject = load(tmp_path)
    assert subject.encode("hi") == [ID["▁hi"]]
    assert subject.encode("hihi  h") == [ID[p] for p in ("▁hi", "hi", "▁", "▁", "h")]
    assert subject.encode("") == []
    assert subject.decode([ID["▁hi"], ID["▁hi"]]) == "hi hi"


def test_unknown_letters_become_bytes(tmp_path: Path) -> None:
    subject = load(tmp_path)
    ids = subject.encode("é\n")
    assert ids == [ID["▁"], 3 + 0xC3, 3 + 0xA9, 3 + 0x0A]
    assert subject.decode(ids) == "é\n"
    assert subject.token_bytes(3 + 0xC3) == b"\xc3"


def test_control_pieces(tmp_path: Path) -> None:
    subject = load(tmp_path)
    assert subject.special_ids == {0, 1, 2}
    assert subject.eos_ids == {2}
    assert subject.encode("hi</s>", special=True) == [ID["▁hi"], 2]
    assert subject.encode("hi</s>") == [ID["▁hi"], ID["</"], ID["s>"]]
    assert subject.encode_prompt("hi") == [1, ID["▁hi"]]
    assert load(tmp_path, {"add_bos_token": False, "bos_token": "<s>"}).encode_prompt("hi") == [
        ID["▁hi"]
    ]


def test_the_blank_after_a_control_piece_is_the_configs_choice(tmp_path: Path) -> None:
    assert load(tmp_path).encode("hi</s>hi", special=True) == [ID["▁hi"], 2, ID["▁hi"]]
    subject = load(tmp_path, {"legacy": False})
    assert subject.encode("hi</s>hi", special=True) == [ID["▁hi"], 2, ID["hi"]]
    assert subject.encode("hi", at_start=False) == [ID["hi"]]
    assert subject.encode("hi") == [ID["▁hi"]]


def test_user_defined_and_added_pieces(tmp_path: Path) -> None:
    model = sentencepiece_model(PIECES) + proto(1, proto(1, b"<sep>") + proto(3, 4))
    (tmp_path / "tokenizer.model").write_bytes(model)
    number = 259 + len(PIECES)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": number + 1}))
    subject = Tokenizer.load(tmp_path)
    assert subject is not None
    assert subject.encode("hi<sep><tool>", special=True) == [ID["▁hi"], number, number + 1]


def test_a_unigram_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(PIECES, model_type=1))
    with pytest.raises(TextError, match=r"tokenizer\.model is no BPE model"):
        Tokenizer.load(tmp_path)


def test_a_piece_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model([*PIECES, "h"]))
    with pytest.raises(TextError, match="twice"):
        Tokenizer.load(tmp_path)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_models_are_refused_or_read(tmp_path_factory: object, data: st.DataObject) -> None:
    model = bytearray(sentencepiece_model(PIECES))
    kind = data.draw(st.sampled_from(["cut", "flip", "noise"]))
    at = data.draw(st.integers(0, len(model) - 1))
    if kind == "cut":
        del model[at:]
    elif kind == "flip":
        model[at] ^= data.draw(st.integers(1, 255))
    else:
        model = bytearray(data.draw(st.binary(max_size=40)))
    directory = tmp_path_factory.mktemp("model")  # type: ignore[attr-defined]
    path = directory / "tokenizer.model"
    path.write_bytes(bytes(model))
    refusal = None
    try:
        size = load_vocabulary(path, SideFiles.read(directory)).get_vocab_size()
    except TextError as error:
        refusal, size = str(error), 0
    assert size > 0 if refusal is None else "tokenizer.model" in refusal
