"""Speeds from work and probes, in closed form; nothing is measured here.

A token reads its dense part from memory at the speed of its formats, then layer by layer its
experts: those that hit at theirs, while the others come from the drive. What is read ahead hides a
part of the drive's time behind the dense part. A pass over a prompt reads each expert once that
some token wants, and computes while the next ones come, so that the longer of the two counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from colibri.lab.forecast.probes import Probes
from colibri.lab.forecast.work import Work

_DECODE_BAND, _PREFILL_BAND = 0.15, 0.20
# Two shares that runs of OLMoE-7B's size, in int4, at 25, 50 and 100 % of its experts came to.
_DRIVE_SHARE = 0.65  # of what bare threads read, while the engine computes beside
_ARITHMETIC_SHARE = 0.82  # of the matrices' speed, for a pass over a prompt with all it has beside
_HIDDEN = 0.35  # of the dense part's time, by experts that are read ahead
_ATTENTION_SHARE = 0.5  # of the speed of memory, for keys and values


@dataclass(frozen=True, slots=True)
class Range:
    """A forecast and its band."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, band: float) -> Range:
        """`value` give or take a share of it."""
        return cls(value, value * (1 - band), value * (1 + band))

    def as_dict(self) -> dict[str, float]:
        """As JSON holds it."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is to be expected.

    Attributes:
        hit_rate: experts of a token that are in memory already.
        bound: what a token waits for longest: `disk`, `memory` or `overhead`.
        bytes_per_token: by source: `disk`, `experts` in memory, `dense`, `kv`.
        decode: tokens per second.
        prefill: tokens per second.
        ttft: seconds from a prompt of `prompt_tokens` to the first token.
        prompt_tokens: its length.
    """

    hit_rate: float
    bound: str
    bytes_per_token: dict[str, int]
    decode: Range
    prefill: Range
    ttft: Range
    prompt_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """As `coli plan --json` shows it."""
        return {
            "bytes_per_token": self.bytes_per_token,
            "hit_rate": self.hit_rate,
            "bound": self.bound,
            "decode_tokens_per_s": self.decode.as_dict(),
            "prefill_tokens_per_s": self.prefill.as_dict(),
            "ttft_s": self.ttft.as_dict(),
            "prompt_tokens": self.prompt_tokens,
        }


def forecast(
    work: Work, probes: Probes, hit_rate: float, resident: float, prompt_tokens: int
) -> Forecast:
    """Expect speeds.

    Args:
        work: what has to be done.
        probes: what the machine does.
        hit_rate: experts of a token that are in memory.
        resident: experts that are in memory at all, 0 to 1; those that a prompt's pass finds there.
        prompt_tokens: of a prompt, and what a token looks back on.
    """
    missed = round((1 - hit_rate) * work.routed_bytes) + work.table_bytes
    kv = round(work.kv_bytes_per_position * prompt_tokens)
    dense_s = sum(n / probes.speed(fmt).bytes_per_s for fmt, n in work.dense_bytes.items())
    dense_s += kv / (_ATTENTION_SHARE * probes.dram_bytes_per_s)
    overhead_s = work.num_layers * probes.layer_s
    experts_s = sum(n / probes.speed(fmt).bytes_per_s for fmt, n in work.expert_formats.items())
    drive_s = missed / (_DRIVE_SHARE * probes.disk_bytes_per_s)
    hidden_s = min(_HIDDEN * dense_s, max(0.0, drive_s - experts_s))
    token_s = dense_s + overhead_s + max(experts_s, drive_s) - hidden_s
    times = {"disk": drive_s, "memory": dense_s + experts_s, "overhead": overhead_s}
    decode = Range.around(1 / token_s, _DECODE_BAND)
    prompt_s = _prompt_s(work, probes, resident, prompt_tokens)
    prefill = Range.around(prompt_tokens / prompt_s, _PREFILL_BAND)
    return Forecast(
        hit_rate=hit_rate,
        bound=max(times, key=lambda name: times[name]),
        bytes_per_token={
            "disk": missed,
            "experts": work.routed_bytes,
            "dense": sum(work.dense_bytes.values()),
            "kv": kv,
        },
        decode=decode,
        prefill=prefill,
        ttft=Range(prompt_s, prompt_tokens / prefill.high, prompt_tokens / prefill.low),
        prompt_tokens=prompt_tokens,
    )


def _prompt_s(work: Work, probes: Probes, resident: float, tokens: int) -> float:
    """Seconds of a prompt, pass by pass."""
    whole, rest = divmod(tokens, work.chunk)
    passes = [work.chunk] * whole + ([rest] if rest else [])
    return sum(_pass_s(work, probes, resident, count) for count in passes)


def _pass_s(work: Work, probes: Probes, resident: float, tokens: int) -> float:
    dense_s = sum(
        max(
            2 * tokens * work.dense_weights[fmt] / _flops(probes, fmt),
            n / probes.speed(fmt).bytes_per_s,
        )
        for fmt, n in work.dense_bytes.items()
    )
    experts_s = drive_s = 0.0
    for layer in work.sparse:
        speed = probes.speed(layer.format)
        # Each token leaves an expert out by chance 1 - active / experts.
        used = layer.num_experts * (1 - (1 - layer.active / layer.num_experts) ** tokens)
        nbytes = used * layer.record_bytes
        flops = 2.0 * tokens * layer.active * layer.weights
        experts_s += max(flops / _flops(probes, layer.format), nbytes / speed.bytes_per_s)
        drive_s += (1 - resident) * nbytes / (_DRIVE_SHARE * probes.disk_bytes_per_s)
    drive_s += tokens * work.table_bytes / (_DRIVE_SHARE * probes.disk_bytes_per_s)
    return dense_s + work.num_layers * probes.layer_s + max(experts_s, drive_s)


def _flops(probes: Probes, fmt: str) -> float:
    """Operations per second of a pass over a prompt, in a format."""
    return _ARITHMETIC_SHARE * probes.speed(fmt).flops_per_s
