"""How fast it will be, as `coli plan` says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibri.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibri.lab.forecast.forecast import Range
    from colibri.lab.forecast.outlook import Outlook

_SOURCES = {
    "heat": "from the experts that earlier runs used",
    "typical": "typical of models like this; a run leaves heat, which tells more",
    "given": "as given",
    "all": "all experts fit",
}
_BOUNDS = {
    "disk": "the drive",
    "memory": "the speed of memory",
    "overhead": "what a layer costs beside its matrices",
}


def lines(outlook: Outlook) -> Iterator[str]:
    """Speeds, where bytes come from, what binds, and what would help."""
    expected, probes = outlook.expected, outlook.probes
    rate, bound = _range(expected.decode), _BOUNDS[expected.bound]
    yield f"Expected: {rate} tokens/s, waiting most for {bound}."
    wait = f"{format_seconds(expected.ttft.low)} to {format_seconds(expected.ttft.high)}"
    yield (
        f"A prompt of {expected.prompt_tokens:,} tokens takes {wait} "
        f"({_range(expected.prefill)} tokens/s)."
    )
    if outlook.hits.source != "all":
        yield f"Hit rate {outlook.hits.rate:.0%}, {_SOURCES[outlook.hits.source]}."
    found, assumed = expected.bytes_per_token, ", assumed" if probes.is_drive_assumed else ""
    yield (
        f"A token reads {format_bytes(found['disk'])} from the drive "
        f"({probes.disk_bytes_per_s / 1e9:.1f} GB/s{assumed}), and from memory "
        f"{format_bytes(found['dense'])} dense, {format_bytes(found['experts'])} of experts and "
        f"{format_bytes(found['kv'])} of keys and values "
        f"({probes.dram_bytes_per_s / 1e9:.0f} GB/s, {probes.threads} threads)."
    )
    if probes.is_disturbed:
        yield (
            f"Other programs took {probes.others_share:.0%} of the processors while this was "
            "measured: on an idle machine it is faster."
        )
    if outlook.changes:
        told = (f"{change.what} (x {change.times_as_fast:.1f})" for change in outlook.changes)
        yield f"What would help most: {'; '.join(told)}."


def _range(found: Range) -> str:
    return f"{_short(found.low)} to {_short(found.high)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
