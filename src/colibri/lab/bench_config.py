"""What `coli bench kernels` is asked to measure, and when the answer would not be a measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from colibri.errors import RequestError
from colibri.formats import FORMATS, Format, Shape, get_format
from colibri.kernels.api import Activations
from colibri.kernels.cpus import num_threads
from colibri.lab.pairs import LEAST_PAIRS

Op = Literal["matrix", "moe_step", "attention", "latent"]
OPS: tuple[Op, ...] = get_args(Op)
LEAST_WORKING_SET = 1_000_000_000
_MOST_OTHERS = 0.10  # share of processor time
_LEAST_CACHES = 4  # a working set must hold the last-level cache this many times


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A gated expert `D -> F -> D`, or (`intermediate_size` None) one square matrix `D -> D`.

    Attributes:
        name: the model that it is taken from.
        hidden_size: D.
        intermediate_size: F.
        num_experts_per_tok: experts of one token.
    """

    name: str
    hidden_size: int
    intermediate_size: int | None = None
    num_experts_per_tok: int = 8

    def matrices(self) -> tuple[Shape, ...]:
        """Distinct `[N, K]`: gate (and up), down."""
        if self.intermediate_size is None:
            return ((self.hidden_size, self.hidden_size),)
        wide = (self.intermediate_size, self.hidden_size)
        return (wide, wide[::-1]) if wide[0] != wide[1] else (wide,)


SHAPES: tuple[ExpertShape, ...] = (
    ExpertShape("qwen3-30b-a3b", 2048, 768),
    ExpertShape("glm-5.2", 6144, 2048),
    ExpertShape("dense-4096", 4096),
)
# The formats that have a bar, as far as this version knows them.
MEASURED = ("int4-g64", "int8-g64", "mxfp4", "fp8-e4m3-b128", "bf16")
# Other groups of the same codes: their errors have a bar too, their speed follows from the above.
ERRORS_ONLY = ("int4-g32", "int4-g128", "int8-g32", "int8-g128")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBench:
    """What to measure.

    Attributes:
        ops: operations.
        formats: of weights, by name.
        error_formats: of which only the error is measured.
        activations: codings of inputs, for formats that are coded; others take float32.
        num_tokens: rows of the input of `matrix`; the others decode one token.
        shapes: of experts.
        pairs: rounds, each with a reading of memory of its own.
        working_set_bytes: distinct weights that are gone through.
        turn_s: how long one contender's turn takes, roughly.
        peer: a driver of ggml, see benchmarks/README.md; None for no peer.
        num_positions: length of the context for `attention` and `latent`.
    """

    ops: tuple[Op, ...] = OPS
    formats: tuple[str, ...] = tuple(name for name in MEASURED if name in FORMATS)
    error_formats: tuple[str, ...] = ERRORS_ONLY
    activations: tuple[Activations, ...] = (Activations.INT16, Activations.INT8)
    num_tokens: tuple[int, ...] = (1, 4, 16, 64)
    shapes: tuple[ExpertShape, ...] = SHAPES
    pairs: int = 9
    working_set_bytes: int = 5 << 28
    turn_s: float = 0.06
    peer: Path | None = None
    num_positions: int = 8192

    def codings(self, fmt: Format) -> tuple[Activations, ...]:
        """How inputs of such matrices are coded."""
        return self.activations if fmt.is_coded else (Activations.FLOAT32,)

    def weights(self, errors_only: bool = False) -> Iterator[tuple[ExpertShape, Format]]:
        """Every shape in every format."""
        for name in self.error_formats if errors_only else self.formats:
            for shape in self.shapes:
                yield shape, get_format(name)

    def as_dict(self) -> dict[str, Any]:
        """Its values as JSON can hold them."""
        return asdict(self) | {"peer": None if self.peer is None else str(self.peer)}

    def why_no_measurement(self, machine: Mapping[str, Any], threads: int) -> list[str]:
        """What makes its figures meaningless on this machine."""
        cache = machine["last_level_cache_bytes"] or 0
        least = max(LEAST_WORKING_SET, _LEAST_CACHES * cache)
        reasons = []
        if self.working_set_bytes < least:
            reasons.append(
                f"a working set of {self.working_set_bytes:,} bytes: caches serve part of it, and "
                f"{least:,} are needed"
            )
        if self.pairs < LEAST_PAIRS:
            reasons.append(f"{self.pairs} rounds: the median of at least {LEAST_PAIRS} counts")
        if threads > num_threads():
            reasons.append(f"{threads} threads on {num_threads()} processors")
        return reasons + why_too_busy(machine)


def why_too_busy(machine: Mapping[str, Any]) -> list[str]:
    """Whether others took more of the processors than the median of rounds can bear."""
    share = machine.get("others_cpu_share") or 0.0
    if share <= _MOST_OTHERS:
        return []
    return [f"other programs took {share:.0%} of the processors: end them and measure again"]


QUICK: Mapping[str, Any] = {
    "formats": ("int4-g64",),
    "error_formats": (),
    "num_tokens": (1, 16),
    "shapes": SHAPES[:1],
    "pairs": LEAST_PAIRS,
    "turn_s": 0.03,
}


def parse_shape(text: str) -> ExpertShape:
    """A known shape by name, or `768x2048`: an expert of F = 768 and D = 2048.

    Raises:
        RequestError: neither.
    """
    for shape in SHAPES:
        if shape.name == text:
            return shape
    rows, _, columns = text.partition("x")
    if rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns):
        return ExpertShape(text, int(columns), int(rows))
    known = ", ".join(shape.name for shape in SHAPES)
    raise RequestError(f"shape {text!r}: write {known}, or rows x columns such as 768x2048")
