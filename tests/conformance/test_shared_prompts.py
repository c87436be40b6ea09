"""Conversations with the same system prompt and tools: what they share is read once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import LLM
from colibri.engine.messages import Event, Prefill, Started, Tokens
from colibri.engine.request import GenerateRequest, SamplingParams
from colibri.engine.task import Listener
from colibri.formats import F32
from colibri.kv import cell_nbytes, common_length
from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from colibri.models.registry import all_families
from colibri.server.prompts import Conversation, Prompt, chat_prompt
from colibri.server.served_model import ServedModel
from tests.tiny import PLAIN, write_tiny
from tests.unit.server.scripted import TEMPLATE, write_model

POSITIONS = 1024
RECURRENT = [
    f for f in all_families() if cell_nbytes(Blueprint.of(f.tiny_config()).states(POSITIONS), F32)
]
SYSTEM = "You are a bird. " * 6
TOOL = {"type": "function", "function": {"name": "fly", "parameters": {"type": "object"}}}
PARAMS = SamplingParams(max_tokens=5, temperature=0.9, seed=3, ignore_eos=True)


class Asked:
    """What an engine says to a conversation."""

    def __init__(self, llm: LLM, prompt: Prompt) -> None:
        self.events: list[Event] = []
        request = GenerateRequest(prompt=prompt.ids, params=PARAMS, marks=prompt.marks)
        llm.engine.submit(request, Listener(self.events.append, self._fail))
        while llm.engine.step():
            pass

    def _fail(self, error: Exception) -> None:
        raise error

    @property
    def reused(self) -> int:
        return next(e.reused_tokens for e in self.events if isinstance(e, Started))

    @property
    def read(self) -> int:
        done = [e.done for e in self.events if isinstance(e, Prefill)]
        return done[-1] - done[0]

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events if isinstance(e, Tokens) for t in e.token_ids]


def test_the_mark_stands_behind_all_that_is_shared(tmp_path: Path) -> None:
    """Variables of the template and demands on tools count."""
    template = f"{{% if mode %}}<|system|>{{{{ mode * 3 }}}}{{% endif %}}{TEMPLATE}"
    model = ServedModel.load(write_model(tmp_path / "m", template=template))

    def asked(text: str, **more: Any) -> Prompt:
        said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        return chat_prompt(model, Conversation(messages=said, tools=[TOOL], **more))

    for more in ({}, {"variables": {"mode": "quick"}}, {"tool_choice": "none"}):
        first, second = asked("Hi", **more), asked("Whither?", **more)
        same = common_length(np.array(first.ids), np.array(second.ids))
        assert first.marks == second.marks == (same,)
    plain = Conversation(messages=[{"role": "user", "content": "Hi"}])
    assert chat_prompt(model, plain).marks == ()


@pytest.mark.parametrize("family", [PLAIN, *RECURRENT], ids=lambda family: family.model_type)
def test_a_second_conversation_reads_only_what_is_new(tmp_path: Path, family: Family) -> None:
    directory = write_tiny(tmp_path / "model", family, max_position_embeddings=POSITIONS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(write_model(tmp_path / "text") / name, directory)
    model = ServedModel.load(directory)

    def asked(*texts: str) -> Prompt:
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        messages = [{"role": "system", "content": SYSTEM}, *said]
        return chat_prompt(model, Conversation(messages=messages, tools=[TOOL]))

    prompts = [asked("Hi"), asked("Hi", "Ho", "And now?"), asked("Whither?")]
    with LLM.open(directory, heat=False, max_sessions=2, threads=1) as llm:
        _, _, other = (Asked(llm, prompt) for prompt in prompts)
    (mark,) = prompts[2].marks
    assert mark > len(SYSTEM)
    assert (other.reused, other.read) == (mark, len(prompts[2].ids) - mark)
    with LLM.open(directory, heat=False, threads=1) as llm:
        assert Asked(llm, prompts[2]).tokens == other.tokens
