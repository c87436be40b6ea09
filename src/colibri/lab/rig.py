"""A model that is driven by a script, and what each stretch of its work took."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from colibri.engine.metrics import ExpertCounts
from colibri.engine.request import GenerateRequest, SamplingParams
from colibri.engine.session import Session
from colibri.engine.task import Listener, Task
from colibri.errors import NativeLibraryError, SettingsError
from colibri.kernels.native import NativeKernels
from colibri.lab.figure import device_bytes, files_bytes
from colibri.lab.routed import RoutedKernels, Script, direct_model
from colibri.llm import LLM
from colibri.llm.loading import Prepared, prepare
from colibri.memory.devices import Reading
from colibri.memory.opening import known_reading
from colibri.memory.system import drop_cached, open_for_reading
from colibri.models.model import Model
from colibri.settings import Settings

_PROMPT = 4
_POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What some tokens took.

    Attributes:
        seconds: on the clock.
        tokens: how many.
        counts: expert traffic meanwhile.
        wanted_bytes: bytes of experts that were used and had not been in memory.
        device_bytes: what the system read for the process; None where it does not tell.
        attention_s: of the seconds, those in attention.
        native_s: of the seconds, those in native calls; 0 where they are not told apart.
        steps: passes that computed the tokens.
        positions: middle of the positions that were computed.
    """

    seconds: float
    tokens: int
    counts: ExpertCounts
    wanted_bytes: int
    device_bytes: int | None
    attention_s: float
    native_s: float = 0.0
    steps: int = 1
    positions: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Speed."""
        return self.tokens / self.seconds

    @property
    def engine_bytes(self) -> int:
        """What the engine says that it read."""
        counts = self.counts
        return counts.bytes_read + counts.slack_bytes + counts.abandoned_bytes

    @property
    def hit_rate(self) -> float:
        """Share of the experts used whose bytes were in memory without having been read ahead."""
        wanted = self.counts.requests
        return 1.0 - self.wanted_bytes / max(1, wanted * self.record_bytes)

    record_bytes: int = 1


class Rig:
    """One model under a script. Close it.

    Attributes:
        llm: the facade; every token goes through it.
        model: what is below.
        script: who is chosen.
        drops: whether the files are dropped from the page cache before each stretch.
        dense_bytes: that every step reads from memory.
    """

    def __init__(self, prepared: Prepared, model: Model, script: Script) -> None:
        self.drops = True
        assert isinstance(prepared.kernels, RoutedKernels)
        self.kernels = prepared.kernels
        self.prepared, self.model, self.script = prepared, model, script
        self.llm = LLM(prepared, model)
        self.record_bytes = prepared.description.experts.layers[0].record_nbytes
        self.model_bytes = files_bytes(prepared.directory)
        self.dense_bytes = dense_bytes(prepared, model)
        self._ids = np.random.default_rng(0)
        direct_model(model, self.kernels, script)

    @classmethod
    def open(cls, settings: Settings, script: Script, **changes: Any) -> Self:
        """Load the model that the settings name, with some of them changed.

        Heat is neither read nor written: every run begins alike.

        Raises:
            NativeLibraryError, SettingsError: there are no native kernels, or none are wanted.
            CheckpointError, BudgetError: as opening a model raises them.
        """
        wanted = {"heat": False, "warm_start": False, "context_length": None, **changes}
        if wanted["context_length"] is None:
            wanted["context_length"] = settings.context_length
        prepared = routed(prepare(replace(settings, **wanted)))
        model, _ = prepared.load()
        forget(prepared)
        return cls(prepared, model, script)

    @property
    def reading(self) -> Reading:
        """How the engine reads its drive."""
        return reading_in_force(self.prepared)

    def decode(self, num_tokens: int) -> Stretch:
        """Decode greedily; the prompt, of a few tokens, does not count."""
        prompt = self.random_ids(_PROMPT)
        self._forget()
        options: dict[str, Any] = {"max_tokens": num_tokens + 1, "temperature": 0.0}
        with self.llm.stream(prompt, ignore_eos=True, **options) as stream:
            next(stream)
            before = self._clocks()
            for _ in range(num_tokens):
                next(stream)
            turn = self._since(before, num_tokens, _PROMPT + num_tokens / 2)
            return replace(turn, steps=num_tokens)

    def decode_together(self, num_steps: int, count: int, *, n: int = 1) -> Stretch:
        """Decode `n` replies each to `count` prompts of a few tokens, in the same passes.

        Until all of them have begun does not count.
        """
        engine = self.llm.engine
        tasks = [self._submit(self.random_ids(_PROMPT), n, num_steps) for _ in range(count)]
        choices = [choice for task in tasks for choice in task.choices]
        self._forget()
        while not all(choice.tokens for choice in choices):
            engine.step()
        before = self._clocks()
        native_s = self.kernels.native_seconds(lambda: [engine.step() for _ in range(num_steps)])
        turn = self._since(before, num_steps * count * n, _PROMPT + num_steps / 2)
        for task in tasks:
            engine.cancel(task)
        return replace(turn, native_s=native_s, steps=num_steps)

    def read_together(self, ids: Sequence[int], n: int) -> Stretch:
        """Read a prompt for `n` replies, until all have begun; passes of a row a reply aside."""
        engine, found = self.llm.engine, []
        task = self._submit(ids, n, n)
        self._forget()
        while not all(choice.tokens for choice in task.choices):
            position, before = self.script.position, self._clocks()
            engine.step()
            if self.script.position - position > n:
                found.append(self._since(before, len(ids), len(ids) / 2))
        engine.cancel(task)
        first, *others = found
        return replace(first, counts=sum((turn.counts for turn in others), first.counts))

    def _submit(self, ids: Sequence[int], n: int, num_steps: int) -> Task:
        """A request for so many tokens of each reply, and more than it will be asked for."""

        def fail(error: Exception) -> None:
            raise error

        params = SamplingParams(max_tokens=num_steps + 2 * n, ignore_eos=True)
        request = GenerateRequest(prompt=tuple(ids), params=params, n=n)
        listener = Listener(lambda _event: None, fail)
        return self.llm.engine.submit(request, listener, shared=False)

    def fill(self) -> None:
        """Read experts until every slot holds one."""
        store, rows = self.model.store, len(self.prepared.description.experts.layers)
        counts = np.ones((rows, store.num_experts))
        while store.warm(counts):
            target = store.num_reads
            while (stats := store.stats).records + stats.failed + stats.withdrawn < target:
                time.sleep(_POLL_S)

    def prefill(self, ids: Sequence[int], session: Session | None = None) -> Stretch:
        """Run a prompt, less what the session holds of it, until its first token is there."""
        self._forget()
        held = 0 if session is None else session.position
        before = self._clocks()
        self.llm.generate(ids, session=session, max_tokens=1, temperature=0.0, ignore_eos=True)
        return self._since(before, len(ids) - held, (held + len(ids)) / 2)

    def random_ids(self, count: int) -> list[int]:
        """Token ids; what they are does not matter."""
        found: list[int] = self._ids.integers(0, self.prepared.config.vocab_size, count).tolist()
        return found

    def _forget(self) -> None:
        if self.drops:
            forget(self.prepared)

    def _clocks(self) -> tuple[float, ExpertCounts, int | None, float]:
        return (
            time.perf_counter(),
            self.llm.metrics().experts,
            device_bytes(),
            self.kernels.attention_s,
        )

    def _since(
        self, before: tuple[float, ExpertCounts, int | None, float], tokens: int, at: float
    ) -> Stretch:
        now = time.perf_counter()
        _, experts, device, attention_s = self._clocks()
        counts = experts - before[1]
        return Stretch(
            seconds=now - before[0],
            tokens=tokens,
            counts=counts,
            wanted_bytes=counts.misses * self.record_bytes
            + counts.ahead_useful_bytes
            + counts.ahead_late_bytes,
            device_bytes=None if device is None or before[2] is None else device - before[2],
            attention_s=attention_s - before[3],
            positions=at,
            record_bytes=self.record_bytes,
        )

    def close(self) -> None:
        """Give everything back."""
        self.llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def dense_bytes(prepared: Prepared, model: Model) -> int:
    """Bytes of the weights that every step reads; of an untied embedding it is one row."""
    embedding = model.trunk.embedding
    found: int = prepared.description.dense_nbytes
    if prepared.description.blueprint.trunk.tied:
        return found
    return found - embedding.format.resident_nbytes((embedding.rows, embedding.columns))


def routed(prepared: Prepared) -> Prepared:
    """The same with kernels that can follow a script.

    Raises:
        NativeLibraryError, SettingsError: there are no native kernels, or none are wanted.
    """
    kernels = prepared.kernels
    if prepared.settings.kernels == "reference":
        raise SettingsError("kernels is reference: only native kernels are measured; leave it out")
    if not isinstance(kernels, NativeKernels):
        raise NativeLibraryError("only native kernels are measured, and there are none: build them")
    own = RoutedKernels(kernels.threads, kernels.activations, kernels.isa)
    return replace(prepared, kernels=own)


def reading_in_force(prepared: Prepared) -> Reading:
    """How experts of an opened model are read: as measured or by default, as settings have it."""
    config = prepared.settings.reader
    found = known_reading(prepared.description.experts, config.cache) or Reading()
    threads = found.threads if config.threads is None else config.threads
    block = found.block if config.block is None else config.block
    return replace(found, threads=threads, block=block)


def forget(prepared: Prepared) -> None:
    """Drop a model's files from the page cache."""
    for path in prepared.description.experts.files:
        forget_file(path)


def forget_file(path: Path) -> None:
    """Drop a file from the page cache."""
    fd, _ = open_for_reading(path, False)
    drop_cached(fd, 0, 0)
    os.close(fd)
