"""Loads a vocabulary: tokenizer.json or tokenizer.model, completed by the side files."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from colibri.errors import TextError
from colibri.text.files import SideFiles
from colibri.text.sentencepiece_model import load_sentencepiece

# Inside a JSON string the quotes would be escaped, so this only matches the key itself.
_EMPTY_MERGES = re.compile(rb'"merges"\s*:\s*\[\s*\]')
_SINGLE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def load_vocabulary(path: Path, side: SideFiles) -> Tokenizer:
    """Read `path` and add the tokens that only the side files name.

    Raises:
        TextError: a file is broken, or two of them give a token different ids.
    """
    if path.suffix == ".model":
        backend = load_sentencepiece(path, legacy=side.flag("legacy") is not False)
    else:
        backend = _load_json(path)
    _add_extra_tokens(backend, side)
    return backend


def _load_json(path: Path) -> Tokenizer:
    try:
        data = path.read_bytes()
        backend = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception for what it cannot parse
        raise TextError(f"{path} cannot be read ({error}): download this file again") from error
    if _EMPTY_MERGES.search(data):
        _refuse_missing_merges(backend, path)
    # A length limit saved in the file would cut prompts silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _refuse_missing_merges(backend: Tokenizer, path: Path) -> None:
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in backend.get_vocab(with_added_tokens=False):
        if len(token) > 1 and token not in added and not _SINGLE.fullmatch(token):
            raise TextError(
                f"{path}: merges is empty although the vocabulary holds {token!r}: "
                "no text would be cut as the model was trained on; download this file again"
            )


def _add_extra_tokens(backend: Tokenizer, side: SideFiles) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in side.extra_tokens():
        if token.text not in known:
            added = AddedToken(
                token.text,
                normalized=token.normalized,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                special=token.special,
            )
            (backend.add_special_tokens if token.special else backend.add_tokens)([added])
        found = backend.token_to_id(token.text)
        if found != token.id:
            raise TextError(
                f"{token.path}: token {token.text!r} has id {token.id} there "
                f"and {found} in the vocabulary: the files do not belong together"
            )
