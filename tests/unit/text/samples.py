"""Checkpoint folders with a tokenizer: small ones made here, and the real ones where they exist."""

import json
import lzma
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from colibri.text import Tokenizer as ColibriTokenizer

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT.parent / "shared" / "tokenizers"
REAL = sorted(path.parent.name for path in SHARED.glob("*/golden_encodings.json"))
NAMES = ["tiny", *REAL]
CHATS = ["tiny", *sorted(path.parent.name for path in SHARED.glob("*/golden_chat.json"))]

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing  spaces  ",
    "def f(x):\n\treturn x**2  # comment\n\n\nclass A:\n    pass\n",
    "日本語のテキスト",
    "\U0001f642\U0001f469\u200d\U0001f4bb",
    "cafe\u0301",
    "\r\nline\r\n\r\nend\n",
    'Hi.<|im_end|>x)<|im_end|>"<|im_end|>1<|im_end|><|im_end|>\n<|im_end|>中<|im_end|>',
    "<|im_start|>user\nhi<|im_end|>\n<think>\n</think>",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_backend() -> Tokenizer:
    """A byte-level BPE with control tokens, one of them (`<think>`) not marked special."""
    backend = Tokenizer(BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    backend.train_from_iterator(["the user said hello to the world, return x"] * 8, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    backend.add_tokens([AddedToken("    ", normalized=True)])
    return backend


def write_tiny(directory: Path) -> Path:
    backend = tiny_backend()
    backend.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    cases = []
    for text in TEXTS:
        ids = backend.encode(text, add_special_tokens=False).ids
        cases.append(
            {"text": text, "ids": ids, "decoded": backend.decode(ids, skip_special_tokens=False)}
        )
    (directory / "golden_encodings.json").write_text(json.dumps({"cases": cases}))
    chat = {
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}],
        "add_generation_prompt": True,
        "name": "system",
        "text": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\n",
    }
    (directory / "golden_chat.json").write_text(json.dumps({"cases": [chat]}))
    return directory


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="colibri-tokenizers-", ignore_cleanup_errors=True)


@cache
def checkpoint(name: str) -> Path:
    """A folder with the tokenizer of that name, unpacked."""
    directory = Path(_scratch().name) / name
    directory.mkdir()
    if name == "tiny":
        return write_tiny(directory)
    for path in (SHARED / name).iterdir():
        if path.suffix == ".xz":
            (directory / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        else:
            shutil.copyfile(path, directory / path.name)
    return directory


@cache
def tokenizer(name: str) -> ColibriTokenizer:
    loaded = ColibriTokenizer.load(checkpoint(name))
    assert loaded is not None
    return loaded


def golden(name: str, kind: str = "encodings") -> list[dict]:
    return json.loads((checkpoint(name) / f"golden_{kind}.json").read_text())["cases"]


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def proto(number: int, value: int | float | bytes) -> bytes:
    """One field of a protocol buffer."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    return _varint(number << 3) + _varint(value)


def sentencepiece_model(pieces: list[str], *, model_type: int = 2) -> bytes:
    """A SentencePiece model: <unk> <s> </s>, 256 bytes, then `pieces`, the best score first."""
    rows = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    rows += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    rows += [(piece, -float(rank), 1) for rank, piece in enumerate(pieces)]
    out = b"".join(
        proto(1, proto(1, text.encode()) + proto(2, score) + proto(3, kind))
        for text, score, kind in rows
    )
    out += proto(2, proto(3, model_type) + proto(35, 1))
    return out + proto(3, proto(1, b"identity") + proto(3, 1) + proto(4, 0))
