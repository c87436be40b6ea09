"""Rotary position embedding: inverse frequencies of every kind, a batch's cosine and sine.

Formulae after the papers (RoFormer; YaRN, arXiv 2309.00071) and the conventions of Hugging Face's
`rope_parameters`: `default`, `linear`, `dynamic`, `yarn` and `llama3`. Everything is computed in
float64 and rounded once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri.errors import ConfigError, UnsupportedModelError
from colibri.kernels.api import Ints, RopeTable

_Frequencies = NDArray[np.float64]
_KEYS = {
    *("rope_type", "rope_theta", "partial_rotary_factor", "factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor"),
    "frequency_factors",
    *("finetuned", "mrope_section", "mrope_interleaved"),  # without a meaning for text
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the leading `2 * len(inverse_frequencies)` dims of a head.

    Attributes:
        inverse_frequencies: `[rotary_dim / 2]` float64.
        attention_factor: multiplies cosine and sine.
        pairing: `half` pairs i with i + rotary_dim/2, `pair` pairs 2i with 2i + 1.
        key: equal for equal tables, so that layers share them.
        score_factor: multiplies the scores of latent attention, which has its own rule: the square
            of YaRN's temperature at `mscale_all_dim` (DeepSeek-V2's code), 1 without that key.
    """

    inverse_frequencies: _Frequencies = field(repr=False, compare=False)
    attention_factor: float
    pairing: Literal["half", "pair"]
    key: tuple[float, ...] = ()
    score_factor: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """Rotated dims of a head."""
        return 2 * len(self.inverse_frequencies)

    def table(self, positions: Ints) -> RopeTable:
        """Cosine and sine `[T, rotary_dim / 2]` of `positions [T]`."""
        angles = positions[:, None].astype(np.float64) * self.inverse_frequencies
        cos, sin = np.cos(angles) * self.attention_factor, np.sin(angles) * self.attention_factor
        return RopeTable(cos.astype(np.float32), sin.astype(np.float32))

    @staticmethod
    def rows(table: RopeTable, rows: Ints | slice) -> RopeTable:
        """Those of `rows` only."""
        return RopeTable(table.cos[rows], table.sin[rows])

    @classmethod
    def from_parameters(
        cls,
        parameters: Mapping[str, Any],
        *,
        head_dim: int,
        max_position_embeddings: int,
        pairing: Literal["half", "pair"] = "half",
    ) -> Rope:
        """Build from config.json's normalised `rope_parameters`.

        Raises:
            UnsupportedModelError: an unknown `rope_type`.
            ConfigError: a key that the kind needs is missing or not a positive number, or beyond
                what floats hold.
        """
        kind = str(parameters.get("rope_type", "default"))
        scaling = _SCALINGS.get(kind)
        if scaling is None:
            raise UnsupportedModelError(
                f"config.json: rope_type {kind!r} is not implemented; known are "
                f"{', '.join(_SCALINGS)}"
            )
        _refuse_unknown(parameters)
        rotary_dim = _rotary_dim(parameters, head_dim)
        theta = _number(parameters, "rope_theta")
        try:
            with np.errstate(over="raise", divide="raise", invalid="raise"):
                plain = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
                context = _Context(parameters, plain, theta, rotary_dim, max_position_embeddings)
                inverse, factor = scaling(context)
                score_factor = _score_factor(context, kind)
        except ArithmeticError:
            raise ConfigError(
                f"config.json: rope_parameters = {dict(parameters)!r}: wanted numbers that give "
                "finite frequencies, found some too large or too small for that"
            ) from None
        key = (*inverse.tolist(), factor)
        return cls(inverse, factor, pairing, key, score_factor)


@dataclass(frozen=True, slots=True)
class _Context:
    parameters: Mapping[str, Any]
    plain: _Frequencies
    theta: float
    rotary_dim: int
    max_position_embeddings: int

    def number(self, key: str, default: float | None = None) -> float:
        return _number(self.parameters, key, default)

    @property
    def original(self) -> float:
        return self.number("original_max_position_embeddings", self.max_position_embeddings)


def _number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    value = default if value is None else value
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value <= sys.float_info.max
    ):
        raise ConfigError(
            f"config.json: rope_parameters.{key} must be a positive number, found {value!r}"
        )
    return float(value)


def _refuse_unknown(parameters: Mapping[str, Any]) -> None:
    for key, value in parameters.items():
        if key not in _KEYS and not isinstance(value, Mapping) and value not in (None, False):
            raise UnsupportedModelError(
                f"config.json: rope_parameters.{key} = {value!r} is not implemented and may change "
                f"the result; known are {', '.join(sorted(_KEYS))}"
            )
        if isinstance(value, Mapping):
            raise UnsupportedModelError(
                f"config.json: rope_parameters.{key} = {dict(value)!r}: parameters by kind of "
                "layer are not implemented for this family"
            )


def _rotary_dim(parameters: Mapping[str, Any], head_dim: int) -> int:
    share = _number(parameters, "partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * min(share, 2.0))
    if share > 1 or rotary_dim % 2:
        raise ConfigError(
            f"config.json: rope_parameters.partial_rotary_factor = {share} must leave an even "
            f"number of the {head_dim} dims of a head"
        )
    return rotary_dim


def _default(context: _Context) -> tuple[_Frequencies, float]:
    return context.plain, 1.0


def _linear(context: _Context) -> tuple[_Frequencies, float]:
    return context.plain / context.number("factor"), 1.0


def _dynamic(context: _Context) -> tuple[_Frequencies, float]:
    """NTK-aware: theta grows only beyond max_position_embeddings, which no context exceeds."""
    context.number("factor")
    return context.plain, 1.0


def _yarn(context: _Context) -> tuple[_Frequencies, float]:
    """YaRN: interpolate slow dims, keep fast ones, ramp between; attention by 0.1 ln(s) + 1."""
    scale, dims = context.number("factor"), context.rotary_dim
    if context.theta <= 1:
        raise ConfigError(
            f"config.json: rope_parameters.rope_theta must be more than 1 for yarn, found "
            f"{context.theta}"
        )

    def dim_of(rotations: float) -> float:
        return (
            dims
            * math.log(context.original / (rotations * 2 * math.pi))
            / (2 * math.log(context.theta))
        )

    low, high = dim_of(context.number("beta_fast", 32.0)), dim_of(context.number("beta_slow", 1.0))
    truncate = context.parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(
            f"config.json: rope_parameters.truncate must be true or false, found {truncate!r}"
        )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    inverse = context.plain / scale * ramp + context.plain * (1 - ramp)
    return inverse, _yarn_attention_factor(context, scale)


def _yarn_attention_factor(context: _Context, scale: float) -> float:
    given = context.parameters
    if given.get("attention_factor") is not None:
        return context.number("attention_factor")
    if given.get("mscale") and given.get("mscale_all_dim"):
        return yarn_mscale(scale, context.number("mscale")) / yarn_mscale(
            scale, context.number("mscale_all_dim")
        )
    return yarn_mscale(scale, 1.0)


def yarn_mscale(scale: float, mscale: float) -> float:
    """YaRN's temperature `0.1 * mscale * ln(scale) + 1`, 1 where nothing is scaled."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _score_factor(context: _Context, kind: str) -> float:
    if kind == "default" or not context.parameters.get("mscale_all_dim"):
        return 1.0
    return yarn_mscale(context.number("factor"), context.number("mscale_all_dim")) ** 2


def _llama3(context: _Context) -> tuple[_Frequencies, float]:
    """Long wavelengths are divided by the factor, short ones kept, those between mixed."""
    factor, low, high = (
        context.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if high <= low:
        raise ConfigError(
            f"config.json: rope_parameters.high_freq_factor must be more than low_freq_factor = "
            f"{low}, found {high}"
        )
    turns = context.original * context.plain / (2 * math.pi)  # in the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * context.plain / factor + smooth * context.plain, 1.0


def _factors(context: _Context) -> tuple[_Frequencies, float]:
    """Each frequency has a divisor of its own, as GGUF files store Llama 3's scaling."""
    found = context.parameters.get("frequency_factors")
    count = context.rotary_dim // 2
    given = found if isinstance(found, list) else []
    numbers = all(isinstance(x, int | float) and 0 < x <= sys.float_info.max for x in given)
    if not numbers or len(given) != count:
        raise ConfigError(
            f"config.json: rope_parameters.frequency_factors must be {count} positive numbers"
        )
    return context.plain / np.array(given, np.float64), 1.0


_SCALINGS: dict[str, Callable[[_Context], tuple[_Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "factors": _factors,
}
