"""The checkpoint's own tokenizer: text to ids and back, with control tokens only where allowed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as Backend

from colibri.checkpoint.gguf import gguf_of, read_gguf
from colibri.errors import RequestError, TextError
from colibri.text.detokenizer import Detokenizer
from colibri.text.files import SideFiles, find_vocabulary
from colibri.text.gguf_vocabulary import has_vocabulary, load_gguf_vocabulary, side_files
from colibri.text.spellings import ControlToken, Spellings
from colibri.text.token_bytes import TokenBytes
from colibri.text.vocabulary import load_vocabulary

_OPENING, _CLOSING = "<[|{\uff5c", ">]|}\uff5c"  # U+FF5C is the wide bar of DeepSeek's markers
# Published spellings that end a turn in every family that has them as a control token.
_END_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|eot|>",
    "<|EOT|>", "<|return|>", "<|call|>", "<|endoftext|>", "</s>", "<\uff5cend▁of▁sentence\uff5c>",
)  # fmt: skip


class Tokenizer:
    """Encodes and decodes with the vocabulary of one checkpoint; safe to share between threads.

    Control tokens are all those marked special, and the added tokens that look like a marker
    (`<think>`, `<tool_call>`), which many vocabularies leave unmarked although templates rely on
    them. Other added tokens, such as runs of blanks, are ordinary text.
    """

    def __init__(self, backend: Backend, side: SideFiles, path: Path) -> None:
        self._backend = backend
        self._path = path
        self._side = side
        self._lock = Lock()  # guards the backend's switches, which every encode sets
        self.special_tokens: Mapping[str, str] = side.special_tokens()
        self.control_tokens = _mark_control_tokens(backend, _named_special(side))
        self.special_ids = frozenset(t.id for t in self.control_tokens if t.special)
        self.control_ids = frozenset(t.id for t in self.control_tokens)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._bytes_of = TokenBytes.of_decoder(_state(backend.decoder), str(path))
        self.strips_first_blank = self._bytes_of.strips_first_blank
        self._metaspaces = _first_only_metaspaces(backend.pre_tokenizer)
        self.eos_ids = self._find_eos_ids()
        self._prefix, self._suffix = self._prompt_affixes()

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """Read the tokenizer of a checkpoint; None where it holds none.

        `tokenizer.json` comes before `tokenizer.model`; tokenizer_config.json,
        special_tokens_map.json and added_tokens.json complete either. `directory` may also be a
        GGUF file, or hold one.

        Raises:
            TextError: a file is broken or of an unknown kind; the message names it.
        """
        if (file := gguf_of(directory)) is not None:
            source = read_gguf(file)
            if not has_vocabulary(source):
                return None
            return cls(load_gguf_vocabulary(source), side_files(source), file)
        path = find_vocabulary(directory)
        if path is None:
            return None
        side = SideFiles.read(directory)
        return cls(load_vocabulary(path, side), side, path)

    def encode(self, text: str, *, special: bool = False, at_start: bool = True) -> list[int]:
        """Turn text into ids, adding nothing.

        Args:
            text: any text.
            special: recognise the spellings of control tokens, as for a rendered chat template.
                Otherwise they are plain text and no control id is ever returned.
            at_start: whether the text begins the prompt; some vocabularies put a blank there.

        Raises:
            RequestError: the text holds half of a surrogate pair.
        """
        with self._lock:
            self._backend.encode_special_tokens = not special
            for metaspace in self._metaspaces:
                metaspace.prepend_scheme = "first" if at_start else "never"
            try:
                ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            except (UnicodeEncodeError, TypeError) as error:
                raise RequestError(f"the text is no valid Unicode: {error}") from error
        return ids if special or self.control_ids.isdisjoint(ids) else self._unforge(ids)

    def encode_prompt(self, text: str, *, special: bool = True) -> list[int]:
        """Turn a raw prompt into ids as transformers would: with BOS and EOS where it adds them.

        That is the post-processor of tokenizer.json, overruled by `add_bos_token` and
        `add_eos_token` of tokenizer_config.json. A BOS that is also written in the text is doubled.
        """
        return [*self._prefix, *self.encode(text, special=special), *self._suffix]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Turn ids into text; bytes that are no UTF-8 become U+FFFD.

        Ids beyond the vocabulary, which padded models can emit, decode to nothing.

        Raises:
            RequestError: an id is negative.
        """
        stream = Detokenizer(self, skip_special=skip_special)
        return "".join([stream.push(token_id) for token_id in ids] + [stream.finish()])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, control tokens spelled out; nothing beyond the vocabulary.

        Raises:
            RequestError: the id is negative.
        """
        if token_id < 0:
            raise RequestError(f"token id {token_id} is negative: ids start at 0")
        token = self._backend.id_to_token(token_id) if token_id < 1 << 32 else None
        return b"" if token is None else self._bytes_of(token)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def ids_within(self, texts: Iterable[str]) -> frozenset[int]:
        """Control tokens whose spelling is one of the texts or a part of one."""
        known = tuple(texts)
        return frozenset(t.id for t in self.control_tokens if any(t.text in text for text in known))

    @cached_property
    def spellings(self) -> Spellings:
        """Finds spelled control tokens in a text."""
        return Spellings(self.control_tokens)

    def normalize(self, text: str) -> str:
        """Return the text as the vocabulary's normalizer leaves it (NFC, for instance)."""
        normalizer = self._backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def _unforge(self, ids: list[int]) -> list[int]:
        """Replace control ids that merges produced from plain letters by their parts."""
        parts: list[int] = []
        for token_id in ids:
            if token_id not in self.control_ids:
                parts.append(token_id)
                continue
            letters = self._backend.id_to_token(token_id) or ""
            for piece in (letters[:1], letters[1:]):
                tokens = self._backend.model.tokenize(piece) if piece != letters else []
                parts += self._unforge([token.id for token in tokens])
        return parts

    def _find_eos_ids(self) -> frozenset[int]:
        eos = self._side.named("eos_token")
        controls = {token.text: token.id for token in self.control_tokens}
        ids = {controls[text] for text in _END_OF_TURN if text in controls}
        if eos is not None:
            ids.add(self._required("eos_token", eos))
        return frozenset(ids)

    def _required(self, name: str, text: str) -> int:
        token_id = self.id_of(text)
        if token_id is None:
            raise TextError(f"{self._side.directory}: {name} {text!r} is no token of {self._path}")
        return token_id

    def _prompt_affixes(self) -> tuple[list[int], list[int]]:
        """What a raw prompt gets in front and behind."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        starts = range(len(full) - len(bare) + 1)
        at = next((i for i in starts if full[i : i + len(bare)] == bare), 0)
        prefix, suffix = full[:at], full[at + len(bare) :]
        return self._overruled("bos", prefix), self._overruled("eos", suffix)

    def _overruled(self, kind: str, affix: list[int]) -> list[int]:
        wanted = self._side.flag(f"add_{kind}_token")
        if wanted is None and kind == "bos" and self._path.suffix == ".model":
            wanted = True  # the default of the tokenizers that were built on SentencePiece
        text = self._side.named(f"{kind}_token") or ("<s>" if wanted and kind == "bos" else None)
        if wanted is None or text is None:
            return affix
        token_id = self._required(f"{kind}_token", text)
        rest = [i for i in affix if i != token_id]
        if not wanted:
            return rest
        return [token_id, *rest] if kind == "bos" else [*rest, token_id]


def _named_special(side: SideFiles) -> frozenset[str]:
    more = side.config.get("additional_special_tokens") or []
    listed = [text for text in more if isinstance(text, str)] if isinstance(more, list) else []
    return frozenset([*side.special_tokens().values(), *listed])


def _mark_control_tokens(backend: Backend, named: frozenset[str]) -> tuple[ControlToken, ...]:
    """Find the control tokens and make the backend's one switch for special tokens cover them."""
    controls: list[ControlToken] = []
    for token_id, token in sorted(backend.get_added_tokens_decoder().items()):
        text = token.content
        special = token.special or text in named
        if special or (len(text) > 2 and text[0] in _OPENING and text[-1] in _CLOSING):
            controls.append(ControlToken(token_id, text, special, token.lstrip, token.rstrip))
            if not token.special:
                token.special = True
                backend.add_special_tokens([token])
    return tuple(controls)


def _state(part: Any) -> dict[str, Any] | None:
    """Return a part of the pipeline as tokenizer.json would spell it."""
    state: dict[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return state


def _first_only_metaspaces(pre_tokenizer: Any) -> list[Any]:
    """Return the steps that put a blank before the text, but not before later parts of it."""
    state = _state(pre_tokenizer) or {}
    steps = [pre_tokenizer]
    if state.get("type") == "Sequence":
        steps = [pre_tokenizer[i] for i in range(len(state["pretokenizers"]))]
    states = [_state(step) or {} for step in steps]
    return [s for s, d in zip(steps, states, strict=True) if d.get("prepend_scheme") == "first"]
