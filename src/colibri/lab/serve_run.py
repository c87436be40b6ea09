"""What figures of `coli bench serve` have in common: how much, and servers of the right size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from colibri.kernels.api import KV_BLOCK
from colibri.lab.bench_model import Progress
from colibri.lab.served import Prompts, ServedProcess
from colibri.llm.loading import Prepared
from colibri.settings import Settings

SHARE = 0.25  # of the experts have slots, where no setting says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBench:
    """How much is measured.

    Attributes:
        figures: names of those that are wanted; all where there are none.
        sessions: numbers of clients that ask at the same time.
        contexts: tokens of their prompts.
        duration_s: of each combination.
        max_tokens: of a reply.
        pairs: rounds of figures that compare.
        steps: decode steps of a round.
    """

    figures: tuple[str, ...] = ()
    sessions: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (1024, 4096)
    duration_s: float = 60.0
    max_tokens: int = 128
    pairs: int = 7
    steps: int = 64

    def quick(self) -> ServeBench:
        """The same with less of everything."""
        return replace(
            self, sessions=(1, 4), contexts=(256,), duration_s=8.0, max_tokens=32, pairs=3, steps=24
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


@dataclass(slots=True)
class ServeRun:
    """One bench under way.

    Attributes:
        bench: how much is measured.
        settings: those that servers start from; they name the model.
        prepared: that model, understood.
        num_servers: started so far; prompts of each are its own.
    """

    bench: ServeBench
    settings: Settings
    progress: Progress
    prepared: Prepared
    num_servers: int = 0

    def server(self, sessions: int, positions: int, **changes: Any) -> ServedProcess:
        """A server with room for so many replies, each of so many positions with its prompt.

        Raises:
            EngineDiedError: it cannot be started; the message is what it said.
        """
        self.num_servers += 1
        plan, given = self.prepared.plan, self.settings
        context = self.context(positions)
        of_block = plan.kv_bytes / max(1, plan.num_kv_blocks)
        wanted: dict[str, Any] = {
            "heat": False,
            "max_sessions": sessions,
            "context_length": context,
            "kv_ram": given.kv_ram or round(sessions * (context // KV_BLOCK + 1) * of_block),
            "expert_slots": given.expert_slots or (SHARE if given.ram is None else None),
            **changes,
        }
        return ServedProcess(replace(given, **wanted))

    def context(self, positions: int) -> int:
        """So many in whole blocks, as far as the model goes."""
        most = self.prepared.config.max_position_embeddings // KV_BLOCK * KV_BLOCK
        return min(most, -(-positions // KV_BLOCK) * KV_BLOCK)

    def prompts(self, prompt_tokens: int, max_tokens: int, seed: int = 0) -> Prompts:
        """Bodies of requests that nobody has made before."""
        return Prompts(
            prompt_tokens, max_tokens, self.prepared.config.num_ids, 1000 * self.num_servers + seed
        )

    def rounds(self, stage: str) -> Iterator[int]:
        """Numbers of the rounds, with progress."""
        for number in range(self.bench.pairs):
            self.progress(stage, number, self.bench.pairs)
            yield number
        self.progress(stage, self.bench.pairs, self.bench.pairs)
