"""Vocabularies out of GGUF metadata cut text as the tokenizer.json that they were made from."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from colibri.checkpoint.gguf import read_gguf
from colibri.errors import TextError
from colibri.text import ChatTemplate, Tokenizer
from colibri.text.gguf_vocabulary import documents
from colibri.text.pre_tokenizers import PRE_TOKENIZERS
from colibri.text.sentencepiece_model import read_sentencepiece
from tests.unit.text.samples import SHARED

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
# The name that converters give the way of cutting of a vocabulary of so many tokens.
NAMES = {151643: "qwen2", 128000: "deepseek-v3", 199998: "gpt-4o", 50280: "olmo"}
FILES = sorted(SHARED.glob("*/tokenizer.json.xz"), key=lambda path: path.stat().st_size)
# All but the smallest take seconds each.
LARGE_LAST = [
    pytest.param(path.parent, id=path.parent.name, marks=[pytest.mark.slow] if number else [])
    for number, path in enumerate(FILES)
]
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no vocabularies beside the checkout")
SMALL = ["a", "b", "c", "Ġ", "ab", "abc", "<|end|>", "mark"]


def write(path: Path, lists: dict[str, Any], **keys: Any) -> Path:
    """A GGUF file that holds a vocabulary and one tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in lists.items():
        writer.add_array(f"tokenizer.ggml.{key}", value)
    for key, value in keys.items():
        name = "tokenizer.chat_template" if key == "template" else f"tokenizer.ggml.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](name, value)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small(path: Path, **keys: Any) -> Path:
    kinds = [NORMAL] * (len(SMALL) - 2) + [CONTROL, USER_DEFINED]
    lists = {"tokens": SMALL, "token_type": kinds, "merges": ["a b", "ab c"]}
    return write(path, lists, **{"model": "gpt2", "pre": "gpt-2", **keys})


def converted(folder: Path, path: Path) -> Path:
    """A tokenizer.json as a converter writes it: one list of tokens, one of merges."""
    found = json.loads(lzma.decompress((folder / "tokenizer.json.xz").read_bytes()))
    vocabulary = dict(found["model"]["vocab"])
    added = {token["content"]: token for token in found["added_tokens"]}
    vocabulary |= {text: token["id"] for text, token in added.items()}
    tokens = [f"[PAD{i}]" for i in range(max(vocabulary.values()) + 1)]
    for text, number in vocabulary.items():
        tokens[number] = text
    kinds = [
        NORMAL if text not in added else CONTROL if added[text]["special"] else USER_DEFINED
        for text in tokens
    ]
    merges = [m if isinstance(m, str) else " ".join(m) for m in found["model"]["merges"]]
    lists = {"tokens": tokens, "token_type": kinds, "merges": merges}
    return write(path, lists, model="gpt2", pre=NAMES[len(found["model"]["vocab"])])


@shared
@pytest.mark.parametrize("folder", LARGE_LAST)
def test_published_vocabularies_cut_alike(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(converted(folder, tmp_path / "m.gguf"))
    assert tokenizer is not None
    cases = json.loads((folder / "golden_encodings.json").read_text())["cases"]
    assert len(cases) > 20
    for case in cases:
        ids = tokenizer.encode(case["text"], special=True)
        assert ids == case["ids"], case["text"]
        assert tokenizer.decode(ids, skip_special=False) == case["decoded"]


@shared
def test_a_sentencepiece_vocabulary_cuts_alike(tmp_path: Path) -> None:
    folder = next(SHARED.glob("*/tokenizer.model")).parent
    pieces = read_sentencepiece(folder / "tokenizer.model").pieces
    lists = {
        "tokens": [piece.text for piece in pieces],
        "scores": [piece.score for piece in pieces],
        "token_type": [piece.kind for piece in pieces],
    }
    path = write(tmp_path / "m.gguf", lists, model="llama", bos_token_id=1, eos_token_id=2)
    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    for case in json.loads((folder / "golden_encodings.json").read_text())["cases"]:
        assert tokenizer.encode(case["text"], special=True) == case["ids"], case["text"]
    assert tokenizer.encode_prompt("a")[0] == 1
    assert tokenizer.eos_ids == {2}


def test_names_switches_and_templates(tmp_path: Path) -> None:
    path = small(
        tmp_path / "m.gguf", eos_token_id=6, bos_token_id=0, add_bos_token=True, template="{{ 1 }}"
    )
    tokenizer, template = Tokenizer.load(path), ChatTemplate.load(path)
    assert tokenizer is not None
    assert template is not None
    assert template.sources == {"default": "{{ 1 }}"}
    assert tokenizer.special_tokens == {"eos_token": "<|end|>", "bos_token": "a"}
    assert tokenizer.encode_prompt("abc") == [0, 5]
    assert tokenizer.encode("abcmark") == [5, 7]
    assert 6 in tokenizer.control_ids
    assert tokenizer.encode("abc<|end|>", special=True) == [5, 6]


def test_documents_make_the_same_tokenizer(tmp_path: Path) -> None:
    """What a conversion puts beside the weights."""
    path = small(tmp_path / "m.gguf", eos_token_id=6, add_bos_token=False, template="{{ 1 }}")
    folder = tmp_path / "converted"
    folder.mkdir()
    for name, data in documents(read_gguf(path)).items():
        (folder / name).write_bytes(data)
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    assert tokenizer is not None
    assert template is not None
    assert template.sources == {"default": "{{ 1 }}"}
    assert tokenizer.encode("abca<|end|>", special=True) == [5, 0, 6]
    assert tokenizer.eos_ids == {6}


def test_a_file_without_a_vocabulary_opens_for_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {})
    assert Tokenizer.load(path) is None
    assert ChatTemplate.load(path) is None
    assert documents(read_gguf(path)) == {}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model": "bert"}, r"model': wanted gpt2 or llama, found 'bert'"),
        ({"pre": "mine"}, r"pre': 'mine' is not known; known are default, gpt-2"),
        ({"eos_token_id": 8}, r"eos_token_id': 8 is none of 8 tokens"),
        ({"add_bos_token": 1}, r"add_bos_token': 1 is neither true nor false"),
    ],
)
def test_what_is_not_known_is_refused(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(TextError, match=says):
        Tokenizer.load(small(tmp_path / "m.gguf", **keys))


@pytest.mark.parametrize(
    ("lists", "says"),
    [
        ({"merges": ["a b c"]}, "wanted two tokens and a blank"),
        ({"merges": ["a c"]}, "'ac' is no token"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "a token stands there twice"),
        ({"token_type": [1]}, "wanted 8 numbers, one a token"),
    ],
)
def test_broken_lists_are_refused(lists: dict[str, Any], says: str, tmp_path: Path) -> None:
    whole = {"tokens": SMALL, "token_type": [NORMAL] * 8, "merges": ["a b"], **lists}
    with pytest.raises(TextError, match=says):
        Tokenizer.load(write(tmp_path / "m.gguf", whole, model="gpt2", pre="gpt-2"))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_way_of_cutting_keeps_every_letter(name: str, tmp_path: Path) -> None:
    text = "Don't  stop 12345 naïve жЖ 漢字かな!\r\n\n  <end> "
    letters = sorted({chr(c) for c in range(0x100, 0x144)} | {chr(c) for c in range(0x21, 0x100)})
    lists = {"tokens": letters, "token_type": [NORMAL] * len(letters), "merges": ["! !"]}
    lists["tokens"] = [*letters, "!!"]
    lists["token_type"] = [NORMAL] * (len(letters) + 1)
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", lists, model="gpt2", pre=name))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(text)) == text
