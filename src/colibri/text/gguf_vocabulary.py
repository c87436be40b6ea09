"""The tokenizer that a GGUF file holds in its metadata, and what files would say beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from colibri.checkpoint.gguf import Gguf
from colibri.checkpoint.strict_json import shown
from colibri.errors import CheckpointError, TextError
from colibri.text.files import SideFiles
from colibri.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from colibri.text.sentencepiece_model import Model, Piece, build_sentencepiece

_START = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
# Kinds of tokens; they are those of SentencePiece.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_NAMES = ("bos", "eos", "unknown", "separator", "padding", "mask")
_SIDE_NAMES = {"unknown": "unk", "separator": "sep", "padding": "pad"}


def has_vocabulary(source: Gguf) -> bool:
    """Whether the file holds one."""
    return source.metadata.get(f"{_START}model") not in (None, "none", "no_vocab")


def load_gguf_vocabulary(source: Gguf) -> Tokenizer:
    """Build a tokenizer that cuts text as the file says.

    Raises:
        TextError: a kind of vocabulary or of cutting that is not known, or broken lists; named.
    """
    model = source.metadata.get(f"{_START}model")
    if model == "gpt2":
        return _byte_level(source)
    if model == "llama":
        return _sentencepiece(source)
    raise _problem(source, "model", f"wanted gpt2 or llama, found {shown(model)}")


def side_files(source: Gguf) -> SideFiles:
    """What tokenizer_config.json would say."""
    return SideFiles(source.path.parent, tokenizer_config(source), {}, {})


def tokenizer_config(source: Gguf) -> dict[str, Any]:
    """Named tokens, whether prompts begin and end with them, and templates.

    Raises:
        TextError: an id beyond the vocabulary, or a switch that is none.
    """
    tokens = _strings(source, "tokens")
    config: dict[str, Any] = {}
    for name in _NAMES:
        number = source.metadata.get(f"{_START}{name}_token_id")
        if number is None:
            continue
        if type(number) is not int or not 0 <= number < len(tokens):
            raise _problem(
                source, f"{name}_token_id", f"{number!r} is none of {len(tokens)} tokens"
            )
        config[f"{_SIDE_NAMES.get(name, name)}_token"] = tokens[number]
    for name in ("bos", "eos"):
        config[f"add_{name}_token"] = _flag(
            source, f"add_{name}_token", _adds(source, name) and f"{name}_token" in config
        )
    if templates := chat_templates(source):
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    return config


def chat_templates(source: Gguf) -> dict[str, str]:
    """Templates by name; the file's own is called `default`."""
    found = {}
    for key, value in source.metadata.items():
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            if not isinstance(value, str):
                raise TextError(f"{source.path}: key {shown(key)} is no text")
            found[key.removeprefix(_TEMPLATE).lstrip(".") or "default"] = value
    return found


def documents(source: Gguf) -> dict[str, bytes]:
    """The files that hold all this where a model is a directory, by name.

    Raises: as the others.
    """
    if not has_vocabulary(source):
        return {}
    config = json.dumps(tokenizer_config(source), ensure_ascii=False, indent=2)
    return {
        "tokenizer.json": load_gguf_vocabulary(source).to_str().encode(),
        "tokenizer_config.json": config.encode(),
    }


def _adds(source: Gguf, name: str) -> bool:
    """Whether prompts begin (or end) with a token where the file does not say."""
    if name == "eos":
        return False
    if source.metadata.get(f"{_START}model") == "llama":
        return True
    way = PRE_TOKENIZERS.get(str(source.metadata.get(f"{_START}pre")))
    return way is not None and way.adds_bos


def _flag(source: Gguf, key: str, default: bool) -> bool:
    value = source.metadata.get(f"{_START}{key}", default)
    if not isinstance(value, bool):
        raise _problem(source, key, f"{value!r} is neither true nor false")
    return value


def _problem(source: Gguf, key: str, what: str) -> TextError:
    return TextError(f"{source.path}: key '{_START}{key}': {what}")


def _strings(source: Gguf, key: str) -> list[str]:
    try:
        found = source.strings(f"{_START}{key}")
    except CheckpointError as error:
        raise TextError(str(error)) from None
    if not found:
        raise _problem(source, key, "wanted an array of strings, found none")
    return found


def _numbers(source: Gguf, key: str, count: int) -> Sequence[Any] | None:
    """A number for each token; None where there are none."""
    found = source.metadata.get(f"{_START}{key}")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != count:
        raise _problem(source, key, f"wanted {count} numbers, one a token")
    return found


def _byte_level(source: Gguf) -> Tokenizer:
    tokens = _strings(source, "tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise _problem(source, "tokens", "a token stands there twice")
    name = source.metadata.get(f"{_START}pre", "default")
    way = PRE_TOKENIZERS.get(str(name))
    if way is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise _problem(source, "pre", f"{name!r} is not known; known are {known}")
    merges = _merges(source, vocabulary)
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=way.ignore_merges))
    _set_steps(backend, way)
    _add_tokens(backend, tokens, _numbers(source, "token_type", len(tokens)))
    return backend


def _merges(source: Gguf, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for line in _strings(source, "merges"):
        left, blank, right = line.partition(" ")
        if not left or not blank or not right or " " in right:
            raise _problem(source, "merges", f"{shown(line)}: wanted two tokens and a blank")
        for part in (left, right, left + right):
            if part not in vocabulary:
                raise _problem(source, "merges", f"{shown(line)}: {shown(part)} is no token")
        pairs.append((left, right))
    return pairs


def _set_steps(backend: Tokenizer, way: PreTokenizer) -> None:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in way.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if way.nfc:
        backend.normalizer = normalizers.NFC()


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], kinds: Sequence[Any] | None) -> None:
    """Tokens that are found in a text before it is cut."""
    for token, kind in zip(tokens, kinds or (), strict=False):
        special = kind in (_CONTROL, _UNKNOWN)
        if special or kind == _USER_DEFINED:
            added = AddedToken(token, normalized=False, special=special)
            (backend.add_special_tokens if special else backend.add_tokens)([added])


def _sentencepiece(source: Gguf) -> Tokenizer:
    tokens = _strings(source, "tokens")
    scores = _numbers(source, "scores", len(tokens))
    kinds = _numbers(source, "token_type", len(tokens))
    if scores is None or kinds is None:
        missing = "scores" if scores is None else "token_type"
        raise _problem(source, missing, "wanted a number for each token, found none")
    pieces = tuple(Piece(*each) for each in zip(tokens, scores, kinds, strict=True))
    model = Model(
        pieces,
        byte_fallback=_BYTE in kinds,
        charsmap=b"",
        add_dummy_prefix=_flag(source, "add_space_prefix", True),
        remove_extra_whitespaces=_flag(source, "remove_extra_whitespaces", False),
    )
    # As users of GGUF files know it: a blank also comes before what follows a control token.
    return build_sentencepiece(model, source.path, legacy=True)
