"""A reply in figures: the footer for people, one JSON object for machines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from colibri.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from colibri.engine.metrics import Metrics
    from colibri.llm import LLM, Completion


def footer(completion: Completion, totals: Metrics) -> str:
    """One line: tokens, speed, hit rate, bytes read, memory against the budget."""
    own = completion.metrics
    speed, hit_rate = own.decode_tokens_per_s, own.expert_hit_rate
    count = completion.completion_tokens
    parts = [
        f"{count} token{'' if count == 1 else 's'} ({completion.finish_reason})",
        f"first after {format_seconds(own.ttft_s)}",
        "" if speed is None else f"{speed:.2f} tok/s",
        "" if hit_rate is None else f"experts {hit_rate:.0%} from memory",
        f"{format_bytes(own.experts.bytes_read + own.experts.table_bytes)} read",
        "" if own.prefetch_recall is None else f"{own.prefetch_recall:.0%} foreseen",
        f"peak {format_bytes(totals.peak_rss_bytes)} of {format_bytes(totals.ram_budget_bytes)}",
    ]
    return " · ".join(part for part in parts if part)


def say(text: str) -> None:
    """Tell people something; stdout is for answers alone."""
    print(text, file=sys.stderr, flush=True)


def say_notes(llm: LLM) -> None:
    """Tell, on stderr, what did not work and does no harm."""
    for note in llm.notes:
        print(f"coli: note: {note}", file=sys.stderr)


def as_json(completion: Completion, llm: LLM) -> dict[str, Any]:
    """What `coli run --json` prints; `settings` holds what was in force, sampling included."""
    own, totals, plan = completion.metrics, llm.metrics(), llm.plan()
    settings = llm.settings.as_dict() | {
        "model": str(llm.prepared.directory),
        "kernels": llm.prepared.kernels.name,
        "activations": llm.prepared.kernels.activations,
        "context_length": plan.context_length,
        "num_slots": plan.num_slots,
        "kv": plan.kv_format,
        "sampling": completion.params.as_dict(),
    }
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "ttft_s": own.ttft_s,
        "prefill_s": own.prefill_s,
        "decode_s": own.decode_s,
        "decode_tokens_per_s": own.decode_tokens_per_s,
        "expert_requests": own.experts.requests,
        "expert_hits": own.experts.hits,
        "expert_hit_rate": own.expert_hit_rate,
        "bytes_read": own.experts.bytes_read,
        "table_bytes": own.experts.table_bytes,
        "ahead_bytes": own.experts.ahead_bytes,
        "ahead_useful_bytes": own.experts.ahead_useful_bytes,
        "ahead_late_bytes": own.experts.ahead_late_bytes,
        "ahead_wasted_bytes": own.experts.ahead_wasted_bytes,
        "prefetch_recall": own.prefetch_recall,
        "peak_rss_bytes": totals.peak_rss_bytes,
        "ram_budget_bytes": totals.ram_budget_bytes,
        "settings": settings,
    }
