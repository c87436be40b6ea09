"""Random weights at disk speed: nothing is drawn or rounded for each expert anew.

A layer draws a few base experts. Every other one is a base whose panels have been turned by another
amount, each part by its own, which costs a copy: no two have the same bytes, or compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri.formats import F32, PANEL_ROWS, Bytes, Format, IntegerFormat, Shape, padded
from colibri.kernels.api import ExpertPart

BIAS_STD = 0.1
_BASES = 2
_STRIP = 16 << 20  # weights
# Scales differ by up to this fraction, so that a kernel that mixes them up is caught.
SCALE_SPREAD = 0.2
_ZERO_NIBBLES = 0x88


def random_matrix(
    fmt: Format, shape: Shape, rng: np.random.Generator, std: float, drawn_rows: int | None = None
) -> Bytes:
    """A normal matrix `[N, K]` of that deviation, as resident bytes; zero from `drawn_rows` on."""
    drawn = shape[0] if drawn_rows is None else min(drawn_rows, shape[0])
    if not isinstance(fmt, IntegerFormat):
        return _random_floats(fmt, shape, rng, std, drawn)
    rows, columns = padded(shape[0], PANEL_ROWS), padded(shape[1], fmt.group)
    table, deviation = code_table(fmt.bits)
    codes = table[rng.integers(0, 256, (rows, columns * fmt.bits // 8), np.uint8)]
    _clear(codes, (drawn, shape[1]), fmt.bits)
    spread = rng.uniform(1 - SCALE_SPREAD, 1 + SCALE_SPREAD, (rows, columns // fmt.group))
    scales = fmt.scale.encode((spread * (std / deviation)).astype(np.float32))
    stored = np.concatenate([codes.reshape(-1), scales.reshape(-1).view(np.uint8)])
    return fmt.pack(stored, shape)


def _random_floats(
    fmt: Format, shape: Shape, rng: np.random.Generator, std: float, drawn: int
) -> Bytes:
    """Plain floats in strips, so that no float32 copy of a large matrix is held."""
    if not fmt.is_plain:
        values = rng.standard_normal(shape, np.float32) * np.float32(std)
        values[drawn:] = 0
        return fmt.pack(fmt.encode(values), shape)
    out, height = np.zeros(fmt.nbytes(shape), np.uint8), max(1, _STRIP // shape[1])
    for first in range(0, drawn, height):
        rows = min(height, drawn - first)
        values = rng.standard_normal((rows, shape[1]), np.float32) * np.float32(std)
        start, data = fmt.nbytes((first, shape[1])), fmt.encode(values)
        out[start : start + data.size] = data
    return out


class Tensor(NamedTuple):
    """A tensor of one part of an expert.

    Attributes:
        data: its bytes.
        panel_nbytes: bytes that belong to eight rows of the part, 0 where none do.
    """

    data: Bytes
    panel_nbytes: int


# Part (0 gate, 1 up, 2 down), generator -> its tensors.
Draw = Callable[[ExpertPart, np.random.Generator], list[Tensor]]


class RandomExperts:
    """The experts of one layer, all different, each made by a copy."""

    def __init__(
        self,
        parts: Sequence[ExpertPart],
        num_experts: int,
        rng: np.random.Generator,
        draw: Draw,
    ) -> None:
        """Draw the bases; the same `rng` gives the same experts."""
        self._turns = [max(part.rows // PANEL_ROWS, 1) for part in parts]
        combinations = math.prod(self._turns)
        self._bases = [
            [draw(part, rng) for part in parts]
            for _ in range(max(min(_BASES, num_experts), -(-num_experts // combinations)))
        ]
        self._step = _coprime(round(combinations * (math.sqrt(5) - 1) / 2), combinations)

    def tensor(self, expert: int, part: int, number: int = 0) -> Bytes:
        """The bytes of a tensor of gate (0), up (1) or down (2)."""
        turn, base = divmod(expert, len(self._bases))
        # Steps through all combinations of turns before one comes again.
        by = turn * self._step // math.prod(self._turns[:part]) % self._turns[part]
        data, panel_nbytes = self._bases[base][part][number]
        return _turned(data, panel_nbytes, self._turns[part], by)


def resident_draw(biased: bool) -> Draw:
    """Draws what a container holds of a part: the resident matrix, and its bias."""

    def draw(part: ExpertPart, rng: np.random.Generator) -> list[Tensor]:
        fmt, std = part.format, part.columns**-0.5
        matrix = random_matrix(fmt, (part.rows, part.columns), rng, std)
        found = [Tensor(matrix, fmt.panel_nbytes(part.columns))]
        if biased:
            bias = random_matrix(F32, (1, part.rows), rng, BIAS_STD)
            found.append(Tensor(bias, PANEL_ROWS * 4))
        return found

    return draw


def _turned(data: Bytes, panel_nbytes: int, count: int, by: int) -> Bytes:
    """The first `count` panels moved up by `by`, those that fall out appended; the rest stays."""
    middle, end = by * panel_nbytes, min(count * panel_nbytes, data.size)
    return np.concatenate([data[middle:end], data[:middle], data[end:]])


def code_table(bits: int) -> tuple[Bytes, float]:
    """256 stored bytes that, drawn evenly, hold normal codes; and the deviation of the codes."""
    codes = _normal_codes(bits)
    deviation = float(codes.std())
    if bits == 8:
        return codes.astype(np.int8).view(np.uint8), deviation
    nibbles = (codes + 8).astype(np.uint8)
    pairs = nibbles[None, :] | (nibbles[:, None] << 4)
    return pairs.reshape(-1).astype(np.uint8), deviation


def _normal_codes(bits: int) -> NDArray[np.float64]:
    """Quantiles of a normal distribution, rounded to codes; symmetric, the largest is the top."""
    count = 1 << bits
    quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    codes: NDArray[np.float64] = np.rint(quantiles * ((count // 2 - 1) / quantiles.max()))
    return codes


def _clear(codes: Bytes, shape: Sequence[int], bits: int) -> None:
    """Zero codes outside `shape`."""
    rows, columns = shape
    zero = _ZERO_NIBBLES if bits == 4 else 0
    whole, half = divmod(columns * bits, 8)
    codes[rows:] = zero
    if half:
        codes[:, whole] = (codes[:, whole] & 0x0F) | (zero & 0xF0)
    codes[:, whole + bool(half) :] = zero


def _coprime(near: int, number: int) -> int:
    """The smallest whole number from `near` on that shares no divisor with `number`."""
    near = max(near, 1)
    while math.gcd(near, number) != 1:
        near += 1
    return near
