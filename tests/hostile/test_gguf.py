"""GGUF files that are cut off, damaged or made to harm: one typed error, and little memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri.checkpoint.gguf import read_gguf
from colibri.checkpoint.gguf_header import Strings, read_gguf_header
from colibri.checkpoint.index import Checkpoint
from colibri.errors import CheckpointError, ColibriError
from colibri.models.description import Description
from colibri.text import ChatTemplate, Tokenizer
from tests.examples import examples
from tests.gguf_files import write_file

UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
F32, Q4_0 = 0, 2


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, extents: tuple[int, ...], kind: int, offset: int) -> bytes:
    head = text(name) + struct.pack("<I", len(extents))
    return head + struct.pack(f"<{len(extents)}QIQ", *extents, kind, offset)


def build(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_keys = (len(tensors), len(keys)) if counts is None else counts
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


HUGE = struct.pack("<Q", 2**63)
GOOD = tensor(b"a", (32, 2), F32, 0)
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "wanted 4 bytes at byte 0, the file has 0"),
    "another kind of file": (b"PK\x03\x04" + bytes(40), "wanted 'GGUF', found b'PK"),
    "version 1": (build(version=1), "GGUF version 1: wanted 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "order of big-endian machines"),
    "too many tensors": (build(counts=(2**60, 0)), "the number of tensors: wanted at most"),
    "too many keys": (build(counts=(0, 2**60)), "the number of keys: wanted at most"),
    "more keys than there are": (build(counts=(0, 9)), "is cut off or damaged"),
    "a key twice": (build((key(b"a", BOOL, b"\1"),) * 2), "the key 'a' stands there twice"),
    "a type that is none": (
        build((key(b"a", 13, b"\0"),)),
        "a type of value from 0 to 12, found 13",
    ),
    "a huge string": (build((key(b"a", STRING, HUGE),)), "at most 67108864 bytes"),
    "a long string": (build((key(b"a", STRING, struct.pack("<Q", 99)),)), "wanted 99 bytes"),
    "a huge name": (build((HUGE,)), "the name of a key: wanted at most 1024 bytes"),
    "a huge array": (
        build((key(b"a", ARRAY, struct.pack("<I", UINT32) + HUGE),)),
        "key 'a'",
    ),
    "a huge array of strings": (
        build((key(b"a", ARRAY, struct.pack("<I", STRING) + HUGE),)),
        "key 'a'",
    ),
    "arrays in arrays": (
        build((key(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 9 + bytes(99)),)),
        "a type of value from 0 to 12, found 9",
    ),
    "alignment 0": (
        build((key(b"general.alignment", UINT32, bytes(4)),)),
        "general.alignment: wanted a multiple of 8",
    ),
    "alignment 3": (
        build((key(b"general.alignment", UINT32, struct.pack("<I", 3)),)),
        "general.alignment: wanted a multiple of 8",
    ),
    "alignment in words": (build((key(b"general.alignment", STRING, text(b"32")),)), "found '32'"),
    "a tensor twice": (
        build((), (GOOD, tensor(b"a", (32, 2), F32, 256)), 512),
        "tensor 'a' stands there twice",
    ),
    "tensors upon each other": (
        build((), (GOOD, tensor(b"b", (32, 2), F32, 128)), 512),
        "tensor 'b': wanted byte .* or later, behind 'a'",
    ),
    "no dimensions": (build((), (tensor(b"a", (), F32, 0),)), "wanted 1 to 4 dimensions, found 0"),
    "nine dimensions": (build((), (tensor(b"a", (1,) * 9, F32, 0),)), "found 9"),
    "no columns": (build((), (tensor(b"a", (0, 2), F32, 0),)), "extents above 0"),
    "more than there is": (build((), (tensor(b"a", (2**40, 2**40), F32, 0),)), "below 2\\^63"),
    "an unread type": (build((), (tensor(b"a", (256,), 17, 0),), 99), "type iq2_xs, which is not"),
    "an unknown type": (
        build((), (tensor(b"a", (256,), 99, 0),), 99),
        "type 99, which is not read",
    ),
    "rows that are no blocks": (
        build((), (tensor(b"a", (33,), Q4_0, 0),), 99),
        "rows that are a multiple of 32 for q4_0, found 33",
    ),
    "an offset between": (build((), (tensor(b"a", (32,), F32, 7),), 256), "a multiple of 32"),
    "an offset outside": (build((), (tensor(b"a", (32,), F32, 2**62),), 256), "is cut off"),
    "data that ends early": (build((), (GOOD,), 255), "is cut off, fetch it again"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    data, says = DAMAGED[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ColibriError, match=says) as refusal:
        read_gguf_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(refusal.value)
    assert peak < 1 << 20


def small(path: Path) -> Path:
    """A file that has a bit of everything."""
    keys: dict[str, Any] = {
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<|x|>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.chat_template": "{{ messages }}",
    }
    names = ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_output.weight"]
    names += [f"blk.0.{n}.weight" for n in ("attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down")]
    tensors = {name: np.ones((32, 32), np.float32) for name in names}
    tensors["token_embd.weight"] = np.ones((4, 32), np.float32)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        tensors[name] = np.ones(32, np.float32)
    return write_file(path, "llama", keys, tensors)


def everything(path: Path) -> None:
    """All that is read of a file before its weights are."""
    description = Description.of(Checkpoint.open(path))
    assert description.dense
    Tokenizer.load(path)
    ChatTemplate.load(path)


def test_the_whole_file_is_fine(tmp_path: Path) -> None:
    path = small(tmp_path / "m.gguf")
    everything(path)
    tokens = read_gguf(path).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, Strings)
    assert tokens.read() == ["a", "b", "ab", "<|x|>"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return small(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def hold(path: Path, data: bytes, what: Callable[[Path], None] = everything) -> None:
    """A damaged file opens, or is refused by a typed error."""
    path.write_bytes(data)
    with suppress(ColibriError):
        what(path)


_fuzz = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@_fuzz
@given(st.data())
def test_files_that_are_cut_off(good: bytes, tmp_path: Path, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(good) - 1))
    path = tmp_path / "m.gguf"
    path.write_bytes(good[:length])
    with pytest.raises(CheckpointError):
        everything(path)


@_fuzz
@given(st.data())
def test_any_damage_ends_in_a_typed_error(good: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of the header become others."""
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 1600))] = data.draw(st.integers(0, 255))
    hold(tmp_path / "m.gguf", bytes(damaged))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"split.count": 3, "split.no": 0}, "wanted part 0 of 1 as its name says"),
        ({"llama.attention.head_count": [2, 1]}, "wanted one number for all layers"),
        ({"llama.attention.max_alibi_bias": 8.0}, r"max_alibi_bias' = 8.0 is not implemented"),
        ({"llama.block_count": 2}, "tensor 'model.layers.1"),
    ],
)
def test_metadata_that_contradict_are_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    base = {
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    good = read_gguf_header(small(tmp_path / "good.gguf"))
    tensors = {name: np.ones(spec.shape, np.float32) for name, spec in good.tensors.items()}
    path = write_file(tmp_path / "m.gguf", "llama", {**base, **change}, tensors)
    with pytest.raises(ColibriError, match=says):
        Description.of(Checkpoint.open(path))
