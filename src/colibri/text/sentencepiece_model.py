"""Reads a SentencePiece `tokenizer.model` and rebuilds it as a `tokenizers.Tokenizer`.

The file is a protocol buffer (`sentencepiece_model.proto` of google/sentencepiece). Only the fields
that decide how text is cut are read, by a reader of the wire format that trusts no length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from colibri.errors import TextError

_BLANK = "▁"
# SentencePiece.Type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BPE = 2  # TrainerSpec.ModelType


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its id is its place in the file."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Model:
    """The parts of a ModelProto that decide how text is cut."""

    pieces: tuple[Piece, ...]
    byte_fallback: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def load_sentencepiece(path: Path, *, legacy: bool) -> Tokenizer:
    """Build a tokenizer that cuts text as the SentencePiece model does.

    Args:
        path: the `tokenizer.model`.
        legacy: the config's switch of that name: also put a blank before text that follows a
            control token, as the first converters did.

    Raises:
        TextError: the file is broken or no BPE model.
    """
    return build_sentencepiece(read_sentencepiece(path), path, legacy=legacy)


def read_sentencepiece(path: Path) -> Model:
    """What a `tokenizer.model` says.

    Raises:
        TextError: the file is broken or no BPE model.
    """
    try:
        return _read_model(path.read_bytes(), path)
    except (ValueError, OSError, struct.error) as error:
        raise TextError(f"{path} is no SentencePiece model ({error})") from error


def build_sentencepiece(model: Model, path: Path, *, legacy: bool) -> Tokenizer:
    """The tokenizer of a model whose parts are known; `path` is what messages name.

    Raises:
        TextError: a piece stands there twice.
    """
    vocabulary = {piece.text: index for index, piece in enumerate(model.pieces)}
    if len(vocabulary) != len(model.pieces):
        raise TextError(f"{path}: a piece stands in the vocabulary twice")
    unknown = next((piece.text for piece in model.pieces if piece.kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_merges(model.pieces),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    )
    _set_normalizer(tokenizer, model, legacy=legacy)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_BLANK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []),
        ]
    )
    for piece in model.pieces:
        if piece.kind in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(piece.text, normalized=False, special=True)])
        elif piece.kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece.text, normalized=False, special=False)])
    return tokenizer


def _set_normalizer(tokenizer: Tokenizer, model: Model, *, legacy: bool) -> None:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix and not legacy:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps += [normalizers.Prepend(_BLANK)] if model.add_dummy_prefix else []
        steps.append(normalizers.Replace(" ", _BLANK))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)


def _merges(pieces: tuple[Piece, ...]) -> list[tuple[str, str]]:
    """Spell the scores as merges: the better its score, the earlier a piece is joined.

    Only normal pieces take part, so that no text can ever be merged into a control token.
    """
    known = {p.text: i for i, p in enumerate(pieces) if p.kind in (_NORMAL, _UNUSED)}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece in pieces:
        if piece.kind != _NORMAL:
            continue
        for cut in range(1, len(piece.text)):
            left, right = known.get(piece.text[:cut]), known.get(piece.text[cut:])
            if left is not None and right is not None:
                halves = (piece.text[:cut], piece.text[cut:])
                ranked.append((-piece.score, left, right, halves))
    return [halves for _, _, _, halves in sorted(ranked)]


def _read_model(data: bytes, path: Path) -> Model:
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_read_piece(_as_bytes(value)))
        elif number == 2:
            trainer = dict(_fields(_as_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_as_bytes(value)))
    if not pieces:
        raise ValueError("it holds no pieces")
    if trainer.get(3, 1) != _BPE:
        raise TextError(f"{path} is no BPE model: put the checkpoint's tokenizer.json beside it")
    return Model(
        tuple(pieces),
        bool(trainer.get(35, 0)),
        _as_bytes(normalizer.get(2, b"")),
        bool(normalizer.get(3, 1)),
        bool(normalizer.get(4, 1)),
    )


def _read_piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    text = _as_bytes(fields.get(1, b"")).decode()
    (score,) = struct.unpack("<f", _as_bytes(fields.get(2, b"\0\0\0\0")))
    kind = fields.get(3, _NORMAL)
    if not text or not isinstance(kind, int):
        raise ValueError("a piece has no text")
    return Piece(text, score, kind)


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has the wrong type")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of one message; numbers for varints, bytes for the rest."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            number, at = _varint(data, at)
            yield key >> 3, number
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if size > len(data) - at:
            raise ValueError(f"a field at byte {at} claims {size} bytes, {len(data) - at} are left")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends inside a number")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError(f"a number at byte {at} is too long")
