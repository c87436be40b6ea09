"""An engine whose replies are known, over a tokenizer of bytes, behind the real server."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from colibri.engine.messages import Done, Event, Finished, Logprobs, Prefill, Ready, Started, Tokens
from colibri.engine.metrics import Metrics
from colibri.engine.request import FinishReason, GenerateRequest, SamplingParams
from colibri.engine.service import Health
from colibri.errors import ColibriError, ContextLengthError, RequestError
from colibri.server.running import Binding, Server
from colibri.server.served_model import ServedModel
from colibri.server.serving import Limits, Serving
from colibri.text import Tokenizer
from colibri.text.constraint import Constraints
from tests.unit.llm.fakes import _byte_of

SPECIAL = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL, THINK, END_THINK, CALL, END_CALL = range(256, 266)
VOCAB = 300
CONTEXT = 512
MOST_REPLIES = 8
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}{% endif %}"
)
Reply = str | bytes | Sequence[int]


def write_model(directory: Path, *, template: str | None = TEMPLATE, **generation: Any) -> Path:
    """A checkpoint's text side: ids 0-255 are bytes, then control tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    backend = Backend(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    config |= {} if template is None else {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(generation))
    (directory / "config.json").write_text('{"model_type": "scripted"}')
    return directory


class ScriptedReply:
    """Plays a script."""

    def __init__(self, service: ScriptedService, id: int, request: GenerateRequest) -> None:
        self.id = id
        eos = () if request.params.ignore_eos else (EOS,)
        stop_ids = tuple(sorted({*eos, *request.params.stop_ids}))
        room = CONTEXT - len(request.prompt)
        length = request.params.max_tokens
        self.params: SamplingParams = replace(
            request.params, stop_ids=stop_ids, max_tokens=room if length is None else length
        )
        self._service = service
        self._request = request
        self._cancelled: dict[int, FinishReason] = {}
        self._events = self._play()
        self.ended = False

    async def _play(self) -> Any:
        yield Started(id=self.id, reused_tokens=self._service.reused)
        total = len(self._request.prompt)
        if self._service.prefill is not None:
            done, of = self._service.prefill
            yield Prefill(id=self.id, done=done, total=of)
        yield Prefill(id=self.id, done=total, total=total)
        counts = []
        for choice in range(self._request.n):
            count = 0
            async for event in self._choice(choice):
                count += len(event.token_ids) if isinstance(event, Tokens) else 0
                yield event
            counts.append(count)
        metrics = Metrics(
            num_requests=1, prompt_tokens=total, completion_tokens=sum(counts),
            reused_tokens=self._service.reused, ttft_s=0.25, prefill_s=0.25, decode_s=0.5,
        )  # fmt: skip
        self.ended = True
        yield Done(id=self.id, metrics=metrics)

    async def _choice(self, choice: int) -> Any:
        reason = FinishReason.LENGTH
        tokens = self._tokens(choice)
        for _ in range(self.params.max_tokens or 0):
            await self._service.step(self)
            if choice in self._cancelled:
                break
            token = next(tokens, EOS)
            logprobs = None
            if self._request.top_logprobs is not None:
                top = tuple((i, -float(i)) for i in range(self._request.top_logprobs))
                logprobs = (Logprobs(-0.5, top),)
            yield Tokens(id=self.id, choice=choice, token_ids=(token,), logprobs=logprobs)
            self._service.num_tokens += 1
            if token in self.params.stop_ids:
                reason = FinishReason.STOP
                break
        yield Finished(id=self.id, choice=choice, reason=self._cancelled.get(choice, reason))

    def _tokens(self, choice: int) -> Iterator[int]:
        script = self._service.script(self._request, choice)
        if self._request.constraint is None:
            yield from script
            return
        constraint = self._service.constraints(self._request.constraint)
        yield from constrained(constraint, script)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event: Event = await anext(self._events)
        return event

    def cancel(
        self, choice: int | None = None, reason: FinishReason = FinishReason.CANCELLED
    ) -> None:
        for index in range(self._request.n) if choice is None else [choice]:
            self._cancelled.setdefault(index, reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.ended:
            self._service.cancelled.append(self.id)
            self._service.was_cancelled.set()
        self._service.in_flight.discard(self.id)


def constrained(constraint: Any, script: Sequence[int]) -> Iterator[int]:
    """What a model that wants to say the script says under a constraint."""
    wishes = iter(script)
    while not constraint.is_finished:
        forced = list(constraint.forced())
        for token in forced:
            constraint.accept(token)
            yield token
        if constraint.is_finished:
            return
        mask = constraint.mask()
        wish = next((token for token in wishes if mask[token]), None)
        token = EOS if wish is None and mask[EOS] else wish
        token = int(mask.nonzero()[0][-1]) if token is None else token
        constraint.accept(token)
        yield token


class ScriptedService:
    """An engine that says what tests want it to.

    Attributes:
        replies: what it says, one a request; the last again and again.
        requests: what it was asked.
        refuses: what it raises instead of accepting.
        fails: what it raises after so many tokens: (tokens, error).
        prefill: how far the prompt is at first, and how long: (done, total).
        cancelled: ids of requests that were given up.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.reset()
        if tokenizer is not None:
            self.constraints = Constraints(tokenizer, VOCAB, [EOS])

    def reset(self) -> None:
        """As if nothing had been asked."""
        self.replies: list[Reply] = [""]
        self.requests: list[GenerateRequest] = []
        self.refuses: Exception | None = None
        self.fails: tuple[int, ColibriError] | None = None
        self.prefill: tuple[int, int] | None = None
        self.cancelled: list[int] = []
        self.was_cancelled = threading.Event()
        self.in_flight: set[int] = set()
        self.num_tokens = 0
        self.reused = 0
        self.health = Health.READY
        self.failure: Exception | None = None
        self.gate: Callable[[int], bool] = lambda step: True
        self._steps = 0

    @property
    def ready(self) -> Ready | None:
        if self.health is Health.STARTING:
            return None
        return Ready(
            pid=1, vocab_size=VOCAB, context_length=CONTEXT, max_context_length=CONTEXT,
            eos_ids=(EOS,), max_sessions=4, max_waiting=8, lossy=("kv=int8",), plan={},
        )  # fmt: skip

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    def script(self, request: GenerateRequest, choice: int) -> list[int]:
        reply = self.replies[min(len(self.requests) - 1, len(self.replies) - 1)]
        if isinstance(reply, str) and self._tokenizer is not None:
            ids = self._tokenizer.encode(reply, special=True, at_start=False)
        else:
            ids = list(reply.encode() if isinstance(reply, str) else reply)
        return [*ids, EOS]

    async def step(self, reply: ScriptedReply) -> None:
        """One forward pass."""
        if self.fails is not None and self.num_tokens >= self.fails[0]:
            raise self.fails[1]
        self._steps += 1
        await asyncio.sleep(0)
        while not self.gate(self._steps):
            await asyncio.sleep(0)

    async def start(self) -> Ready:
        assert self.ready is not None
        return self.ready

    async def submit(self, request: GenerateRequest) -> ScriptedReply:
        if self.refuses is not None:
            raise self.refuses
        room = CONTEXT - len(request.prompt)
        if room < (1 if request.params.max_tokens is None else request.params.max_tokens):
            raise ContextLengthError(f"the prompt has {len(request.prompt)} tokens, too many")
        if request.n > MOST_REPLIES:
            raise RequestError(f"n is {request.n}, but {MOST_REPLIES} are computed together")
        if request.constraint is not None:
            self.constraints(request.constraint)
        self.requests.append(request)
        reply = ScriptedReply(self, len(self.requests), request)
        self.in_flight.add(reply.id)
        return reply

    async def metrics(self) -> Metrics:
        return Metrics(num_requests=len(self.requests), rss_bytes=123, lossy=("kv=int8",))

    async def close(self, drain_s: float = 0.0) -> None:
        self.health = Health.CLOSING


class Running:
    """A server that listens.

    Attributes:
        url: where.
        service: its engine.
        serving: its parts.
    """

    def __init__(self, url: str, service: ScriptedService, serving: Serving) -> None:
        self.url, self.service, self.serving = url, service, serving


@contextmanager
def running(directory: Path, **limits: Any) -> Iterator[Running]:
    """The real server over a scripted engine, in a thread of its own."""
    model = ServedModel.load(directory)
    service = ScriptedService(model.tokenizer)
    serving = Serving(model=model, engine=service, limits=Limits(**limits))
    server: list[Server] = []
    listening = threading.Event()

    async def main() -> None:
        server.append(Server(serving, Binding(port=0, drain_s=1)))
        task = asyncio.create_task(server[0].serve())
        await server[0].listening.wait()
        listening.set()
        await task

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # client and server wait for each other by turns
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert listening.wait(10)
        host, port = server[0].address
        yield Running(f"http://{host}:{port}", service, serving)
    finally:
        server[0].should_exit = True
        thread.join(10)
        sys.setswitchinterval(interval)
