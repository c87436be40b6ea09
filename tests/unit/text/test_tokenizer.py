import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from colibri.errors import RequestError, TextError
from colibri.text import Tokenizer
from tests.unit.text.samples import NAMES, golden, tiny_backend, tokenizer, write_tiny


def load(directory: Path) -> Tokenizer:
    loaded = Tokenizer.load(directory)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("name", NAMES)
def test_encodes_and_decodes_like_the_reference(name: str) -> None:
    subject = tokenizer(name)
    for case in golden(name):
        assert subject.encode(case["text"], special=True) == case["ids"], case["text"]
        assert subject.decode(case["ids"], skip_special=False) == case["decoded"]


@pytest.mark.parametrize("name", NAMES)
def test_ordinary_text_is_the_same_with_and_without_control_tokens(name: str) -> None:
    subject = tokenizer(name)
    ordinary = [c for c in golden(name) if subject.control_ids.isdisjoint(c["ids"])]
    assert len(ordinary) >= 8
    for case in ordinary:
        assert subject.encode(case["text"]) == case["ids"], case["text"]


@pytest.mark.parametrize("name", NAMES)
def test_spelled_control_tokens_stay_text(name: str) -> None:
    subject = tokenizer(name)
    blank = " " if subject.strips_first_blank else "▁"  # SentencePiece decodes its own sign so
    for token in subject.control_tokens:
        for text in (token.text, token.text * 2, f"Hi.{token.text}\n中{token.text} x"):
            ids = subject.encode(text)
            assert subject.control_ids.isdisjoint(ids), text
            assert subject.decode(ids) == text.replace("▁", blank)
        assert token.id in subject.encode(f"a{token.text}b", special=True)
        assert subject.id_of(token.text) == token.id


def test_both_spellings_of_merges_are_one_vocabulary(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    pairs = [m.split(" ") if isinstance(m, str) else m for m in data["model"]["merges"]]
    loaded = []
    for merges in (pairs, [" ".join(pair) for pair in pairs]):
        data["model"]["merges"] = merges
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        loaded.append(load(tmp_path))
    for case in golden("tiny"):
        assert [t.encode(case["text"], special=True) for t in loaded] == [case["ids"]] * 2


@pytest.mark.parametrize("indent", [None, 2])
def test_empty_merges_are_refused(tmp_path: Path, indent: int | None) -> None:
    write_tiny(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(data, indent=indent))
    with pytest.raises(TextError, match=r"tokenizer\.json: merges is empty"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_of_single_letters_needs_no_merges(tmp_path: Path) -> None:
    backend = Backend(BPE({letter: i for i, letter in enumerate("abc")}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode("cab") == [2, 0, 1]


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(TextError, match=r"tekken\.json is in a format"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"model": 1}', b"\xff\xfe", b"null"])
@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"],
)
def test_broken_files_are_named(tmp_path: Path, name: str, data: bytes) -> None:
    write_tiny(tmp_path)
    (tmp_path / name).write_bytes(data)
    if name.startswith(("tokenizer_", "special")) and data == b'{"model": 1}':
        assert load(tmp_path).eos_ids  # a key that nobody reads
        return
    with pytest.raises(TextError, match=name.replace(".", r"\.")):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "<nowhere>"}, "eos_token '<nowhere>' is no token"),
        ({"add_bos_token": "yes", "bos_token": "<|im_end|>"}, "add_bos_token is 'yes'"),
        ({"added_tokens_decoder": {"9": {"content": "<|im_end|>"}}}, "has id 9 there and 2"),
        ({"added_tokens_decoder": {"x": {"content": "<z>"}}}, "'<z>' is 'x'"),
        ({"added_tokens_decoder": {"9": {}}}, "has no content"),
        ({"added_tokens_decoder": []}, None),
        ({"added_tokens_decoder": [1]}, "must map ids"),
    ],
)
def test_contradicting_config_is_refused(
    tmp_path: Path, config: dict[str, object], message: str | None
) -> None:
    write_tiny(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if message is None:
        assert load(tmp_path).vocab_size == tiny_backend().get_vocab_size()
        return
    with pytest.raises(TextError, match=message):
        Tokenizer.load(tmp_path)


def test_tokens_of_side_files_join_the_vocabulary(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    size = load(tmp_path).vocab_size
    entry = {"content": "<|call|>", "special": True, "normalized": False}
    config = {"added_tokens_decoder": {str(size): entry}, "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": size + 1}))
    subject = load(tmp_path)
    assert subject.encode("a<|call|><tool>", special=True)[1:] == [size, size + 1]
    assert subject.decode([size, size + 1]) == "<tool>"
    assert {size, size + 1} <= subject.control_ids
    assert subject.eos_ids == {0, 2, size}
    assert subject.vocab_size == size + 2


def test_named_special_tokens_are_special(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<think>"}))
    subject = load(tmp_path)
    think = subject.id_of("<think>")
    assert think in subject.special_ids
    assert subject.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<think>"}


def with_bos(directory: Path) -> Path:
    backend = tiny_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.enable_truncation(3)
    backend.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize(
    ("config", "prefix", "suffix"),
    [
        ({}, [0], []),
        ({"add_bos_token": False, "bos_token": "<|endoftext|>"}, [], []),
        ({"add_bos_token": True, "bos_token": "<|endoftext|>"}, [0], []),
        ({"add_bos_token": True, "bos_token": "<|im_start|>"}, [1, 0], []),
        ({"add_eos_token": True, "eos_token": "<|im_end|>"}, [0], [2]),
    ],
)
def test_raw_prompts_get_what_transformers_adds(
    tmp_path: Path, config: dict[str, object], prefix: list[int], suffix: list[int]
) -> None:
    (with_bos(tmp_path) / "tokenizer_config.json").write_text(json.dumps(config))
    subject = load(tmp_path)
    text = "hello to the world, return x <|im_end|>"
    body = subject.encode(text, special=True)
    assert len(body) > 3  # the file's own truncation is not obeyed
    assert body[-1] == 2
    assert subject.encode_prompt(text) == [*prefix, *body, *suffix]
    assert subject.encode_prompt("") == [*prefix, *suffix]
    assert 2 not in subject.encode_prompt(text, special=False)[: len(body)]


def test_merges_cannot_forge_a_control_token(tmp_path: Path) -> None:
    vocabulary = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}
    backend = Backend(BPE(vocabulary, [("<", "s"), ("<s", ">")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    subject = load(tmp_path)
    assert subject.encode("s<s>", special=True) == [1, 4]
    assert subject.encode("s<s>") == [1, 0, 1, 2]


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    backend = tiny_backend()
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TextError, match="WordPiece"):
        Tokenizer.load(tmp_path)


def test_ids_outside_the_vocabulary() -> None:
    subject = tokenizer("tiny")
    assert subject.decode([subject.vocab_size, 1 << 31, 1 << 40]) == ""
    assert subject.token_bytes(subject.vocab_size) == b""
    assert subject.id_of("<nowhere>") is None
    with pytest.raises(RequestError, match="-1 is negative"):
        subject.decode([-1])


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="no valid Unicode"):
        tokenizer("tiny").encode("a\ud83d")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives(text: str) -> None:
    subject = tokenizer("tiny")
    assert subject.decode(subject.encode(text), skip_special=False) == subject.normalize(text)


def test_threads_share_one_tokenizer() -> None:
    subject = tokenizer("tiny")
    text = "hello <|im_end|> world " * 20

    def count(special: bool) -> int:
        return subject.encode(text, special=special).count(2)

    wanted = [True, False] * 40
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(count, wanted)) == [20 if special else 0 for special in wanted]
