"""An `LLM` over a model whose replies are known, with a real tokenizer of bytes."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from colibri.llm import LLM
from colibri.llm.defaults import GenerationDefaults
from colibri.llm.loading import Prepared
from colibri.memory.prefetch import LookaheadStats
from colibri.memory.store_stats import AheadBytes
from colibri.settings import Settings
from colibri.text import ChatTemplate, Tokenizer
from tests.unit.engine.counter import VOCAB, CounterModel

BOS, EOS, USER, ASSISTANT, THINK, END_THINK = range(256, 262)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(directory: Path, *, chat: bool = True) -> None:
    """Token ids 0-255 are the bytes themselves, sorted; then control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    backend = Backend(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | (
        {"chat_template": TEMPLATE} if chat else {}
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _byte_of(letter: str) -> int:
    """The byte that a letter of the byte-level alphabet stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    code = ord(letter)
    return code if code in printable else others[code - 256]


class FakeStore:
    """Expert traffic: each pass asks for four experts and misses one."""

    def __init__(self, model: CounterModel) -> None:
        self._model = model

    @property
    def stats(self) -> SimpleNamespace:
        n = len(self._model.passes)
        return SimpleNamespace(
            requests=4 * n,
            hits=3 * n,
            misses=n,
            bytes_read=n * 1000,
            slack_bytes=n,
            abandoned_bytes=0,
            prefetched=0,
            withdrawn=0,
            predicted=AheadBytes(),
        )


class FakeModel(CounterModel):
    """The parts of a model that `LLM` touches."""

    def __init__(self) -> None:
        super().__init__()
        self.store = FakeStore(self)
        self.tables = ()
        self.prefetcher = SimpleNamespace(stats=LookaheadStats())
        self.closed = 0

    def says(self, reply: str | bytes | Sequence[int], prompt_tokens: int) -> None:
        """Reply with these tokens to a prompt of that length, and then with end of turn."""
        data = reply.encode() if isinstance(reply, str) else reply
        script = [*data, EOS]

        def follow(history: Sequence[int]) -> int:
            return script[min(len(history) - prompt_tokens, len(script) - 1)]

        self.follow = follow

    def close(self) -> None:
        self.closed += 1


def make_llm(
    directory: Path,
    *,
    context_length: int = 256,
    prefill_chunk: int = 64,
    eos_token_id: Any = None,
    settings: Settings | None = None,
) -> tuple[LLM, FakeModel]:
    """An LLM over whatever text files the directory holds."""
    tokenizer = Tokenizer.load(directory)
    config = SimpleNamespace(
        vocab_size=VOCAB,
        num_ids=VOCAB,
        eos_token_id=eos_token_id,
        max_position_embeddings=context_length,
    )
    plan = SimpleNamespace(
        context_length=context_length,
        prefill_chunk=prefill_chunk,
        max_sessions=1,
        budget_bytes=2**40,
        num_slots=8,
        num_experts=16,
        kv_format="f32",
    )
    prepared = Prepared(
        settings=settings or Settings(),
        description=cast(
            Any,
            SimpleNamespace(
                checkpoint=SimpleNamespace(directory=directory, place=directory),
                blueprint=SimpleNamespace(config=config, family=SimpleNamespace(dialect=None)),
                rounded={},
            ),
        ),
        tokenizer=tokenizer,
        template=ChatTemplate.load(directory) if tokenizer is not None else None,
        defaults=GenerationDefaults.load(directory),
        kernels=cast(Any, SimpleNamespace(name="fake", activations="float32")),
        plan=cast(Any, plan),
    )
    model = FakeModel()
    return LLM(prepared, cast(Any, model)), model
