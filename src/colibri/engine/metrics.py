"""One snapshot of what the engine has done; every report is made from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCounts:
    """Expert traffic since the start; hits + misses == requests.

    Attributes:
        requests: experts asked for.
        hits: those that were in memory, or on the way.
        misses: those that had to be read.
        prefetched: experts read without a request.
        wanted: experts used by layers that had been predicted by the layer before.
        foreseen: those of them that were in the prediction.
        bytes_read: of all that was read.
        slack_bytes: read beside it, because direct reads are aligned.
        abandoned_bytes: of records that were called off before all of them was read.
        ahead_bytes: asked for by predictions.
        ahead_useful_bytes: of these, what was there when it was wanted.
        ahead_late_bytes: what was still on the way then.
        ahead_wasted_bytes: what was read and evicted unused.
        table_bytes: read row by row of tables that stay on disk, beside all experts.
    """

    requests: int = 0
    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    wanted: int = 0
    foreseen: int = 0
    bytes_read: int = 0
    slack_bytes: int = 0
    abandoned_bytes: int = 0
    ahead_bytes: int = 0
    ahead_useful_bytes: int = 0
    ahead_late_bytes: int = 0
    ahead_wasted_bytes: int = 0
    table_bytes: int = 0

    def __add__(self, other: ExpertCounts) -> ExpertCounts:
        return ExpertCounts(**{k: getattr(self, k) + getattr(other, k) for k in _COUNTS})

    def __sub__(self, other: ExpertCounts) -> ExpertCounts:
        return ExpertCounts(**{k: getattr(self, k) - getattr(other, k) for k in _COUNTS})


_COUNTS = tuple(item.name for item in fields(ExpertCounts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Of one request, or of all of them together.

    Attributes:
        num_requests: replies that were begun.
        prompt_tokens: ids of the prompts.
        reused_tokens: those of them whose state a session still held.
        completion_tokens: new ids.
        decode_tokens: new ids that came out of a decode step: all but each reply's first.
        ttft_s: from the request to its first token, waiting included.
        prefill_s: time until the first token was chosen.
        decode_s: time for the others; what the caller does in between does not count.
        experts: expert traffic; of one request, that of all passes it took part in.
        num_running: replies being computed now.
        num_waiting: requests whose turn has not come.
        num_prefixes: conversations whose state is kept for what may follow.
        num_unsaved: those of them that are not on disk yet, where they are to be.
        kv_blocks: blocks of attention state, each of 64 positions.
        kv_free_blocks: those that hold nothing.
        rss_bytes: memory of the process now.
        peak_rss_bytes: the most it ever was.
        ram_budget_bytes: what it may be.
        lossy: settings that trade accuracy, such as `kv=int8`; none is a default.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0
    decode_tokens: int = 0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    experts: ExpertCounts = ExpertCounts()
    num_running: int = 0
    num_waiting: int = 0
    num_prefixes: int = 0
    num_unsaved: int = 0
    kv_blocks: int = 0
    kv_free_blocks: int = 0
    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    ram_budget_bytes: int = 0
    lossy: tuple[str, ...] = ()

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Speed of decoding; None before there was any."""
        return self.decode_tokens / self.decode_s if self.decode_tokens else None

    @property
    def expert_hit_rate(self) -> float | None:
        """Share of expert requests served from memory; None before there was any."""
        return self.experts.hits / self.experts.requests if self.experts.requests else None

    @property
    def prefetch_recall(self) -> float | None:
        """Share of the experts used that were foreseen; None where nothing was predicted."""
        return self.experts.foreseen / self.experts.wanted if self.experts.wanted else None

    def as_dict(self) -> dict[str, Any]:
        """Every figure by name, rates included, in one flat mapping."""
        figures = asdict(self)
        counts = figures.pop("experts")
        traffic = {k if "bytes" in k else f"expert_{k}": v for k, v in counts.items()}
        rates = {
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "expert_hit_rate": self.expert_hit_rate,
            "prefetch_recall": self.prefetch_recall,
        }
        return figures | traffic | rates
