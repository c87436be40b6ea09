"""A real checkpoint whose whole reply is known: each token is followed by the next id.

The embedding is the identity, attention and experts add nothing although experts are read, and row
i + 1 of the head is the unit vector i. What follows the marker of the assistant is spelled by
the vocabulary.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from colibri.checkpoint.safetensors_writer import save_hf
from colibri.models.blueprint import Blueprint
from tests.tiny import PLAIN, dense_tensors, expert_tensors
from tests.unit.llm.fakes import _byte_of
from tests.unit.server.scripted import TEMPLATE

VOCAB = 512
CALL = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
REPLY = [
    "<think>", "hm", "</think>", "\n\n", "Hi", " \xf0", "\x9f\xa6", "\x9c.",
    "<tool_call>", CALL, "</tool_call>", "</s>",
]  # fmt: skip
"""What the model says, token by token; bytes beyond ASCII as Latin-1."""

ALWAYS = ("<s>", "<|system|>", "<|user|>", "<|tool|>", "<|assistant|>")
CONTENT = "Hi 🦜."


def letters(text: str) -> str:
    """A text as a byte-level vocabulary spells it."""
    return "".join(_ALPHABET[byte] for byte in text.encode("latin-1"))


_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)


def write_counter(directory: Path) -> Path:
    """Write the checkpoint and its tokenizer."""
    config = PLAIN.tiny_config(
        vocab_size=VOCAB, hidden_size=VOCAB, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_hidden_layers=2, max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    blueprint = Blueprint.of(config)
    tensors = dense_tensors(blueprint) | expert_tensors(blueprint, PLAIN.spelling)
    for name, value in tensors.items():
        if name.endswith("norm.weight"):
            value[:] = 1
        if "o_proj" in name or "down_proj" in name or ".w2." in name:
            value[:] = 0
    identity = np.eye(VOCAB, dtype=np.float32)
    tensors["model.embed_tokens.weight"] = identity
    tensors["lm_head.weight"] = np.roll(identity, 1, axis=0)
    for ours, theirs in PLAIN.unrename:
        tensors = {name.replace(ours, theirs): value for name, value in tensors.items()}
    save_hf(directory, config, tensors)
    _write_tokenizer(directory)
    return directory


def _write_tokenizer(directory: Path) -> None:
    vocabulary = {letter: index for index, letter in enumerate(_ALPHABET)}
    for token in ALWAYS:
        vocabulary[token] = len(vocabulary)
    for token in REPLY:
        vocabulary[token if token.startswith("<") else letters(token)] = len(vocabulary)
    backend = Backend(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = (*ALWAYS, "</s>")
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    # No merge makes the others: they are added tokens, although some are halves of letters.
    others = [token if token[0] == "<" else letters(token) for token in REPLY[:-1]]
    backend.add_tokens([AddedToken(text, normalized=False) for text in others])
    backend.save(str(directory / "tokenizer.json"))
    side = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(side))
