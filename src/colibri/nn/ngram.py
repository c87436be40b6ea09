"""Embeddings of the n-grams that end at each token, out of a hashed table that stays on disk.

After Engram (arXiv 2601.07372), as Qwen3.8-Flash-Next has it: every order of n-gram has several
heads, each of which hashes it to a row of its own range of the table. What is found is projected to
one value and to a key for each residual stream; the match of key and stream gates the value, and a
dilated convolution adds what earlier positions were given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from colibri.formats import Floats
from colibri.kernels.api import Batch, CellLayer, Ints
from colibri.kernels.recurrent_api import GroupNorm, Projections, ShortConv, conv_state_nbytes
from colibri.kv import StateShape
from colibri.nn.cell import cell_of, shares, shares_nbytes
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, Rows, bind_linear, linear
from colibri.nn.sublayer import BoundSublayer, Demand, Site, Step, Sublayer

_MASK = (1 << 64) - 1
_GAMMA, _LAYERS_APART = 0x9E3779B97F4A7C15, 10007


def split_mix(value: int) -> int:
    """SplitMix64's output for a state (Steele, Lea and Flood, 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _is_prime(value: int) -> bool:
    odd = range(3, math.isqrt(value) + 1, 2)
    return value == 2 or (value > 2 and value % 2 == 1 and all(value % d for d in odd))


@cache
def primes_from(first: int, count: int) -> tuple[int, ...]:
    """The `count` lowest primes that are at least `first`."""
    found: list[int] = []
    while len(found) < count:
        if _is_prime(first):
            found.append(first)
        first += 1
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramHash:
    """Which rows the n-grams of a token have.

    Attributes:
        vocab_size: of tokens.
        order: the largest n; there are n-grams of 2 to `order` tokens.
        heads: of each n.
        first_size: heads have the primes from here on as sizes, one after another.
        divisor: the table's rows are padded to a multiple of it.
        layer: how many layers before have a table: theirs take the primes before.
        seed: of the multipliers.
        end: the token beyond which no n-gram reaches, and which stands for what is not there.
    """

    vocab_size: int
    order: int
    heads: int
    first_size: int
    divisor: int
    layer: int
    seed: int
    end: int

    @property
    def num_heads(self) -> int:
        """Rows of a token."""
        return (self.order - 1) * self.heads

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Rows of each head, `[num_heads]`."""
        primes = primes_from(self.first_size, (self.layer + 1) * self.num_heads)
        return np.array(primes[-self.num_heads :], np.int64)

    @property
    def num_rows(self) -> int:
        """Of the table."""
        return -(-int(self.sizes.sum()) // self.divisor) * self.divisor

    @property
    def multipliers(self) -> list[int]:
        """Odd, one for each place of an n-gram; a token's product stays below 2^63."""
        half = max(1, ((1 << 63) - 1) // max(self.vocab_size, 1) // 2)
        base = self.seed + _LAYERS_APART * self.layer
        return [
            2 * (split_mix((base + _GAMMA * (place + 1)) & _MASK) % half) + 1
            for place in range(self.order)
        ]

    def rows(self, history: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows `[T, num_heads]` of the last T tokens of `history [order - 1 + T]`.

        Head by head of the bigrams, then of the trigrams and so on.
        """
        before = self.order - 1
        num = len(history) - before
        mixed = history[before:] * self.multipliers[0]
        inside = np.ones(num, np.bool_)
        blocks = []
        for back in range(1, self.order):
            token = history[before - back : before - back + num]
            inside &= token != self.end
            mixed = mixed ^ np.where(inside, token, self.end) * self.multipliers[back]
            sizes = self.sizes[(back - 1) * self.heads : back * self.heads]
            blocks.append(mixed[:, None] % sizes)
        offsets = np.cumsum(self.sizes) - self.sizes
        found: NDArray[np.int64] = np.concatenate(blocks, axis=1) + offsets
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramEmbedding(Sublayer):
    """Adds to all streams what the n-grams that end at a token stand for.

    Attributes:
        num_streams: n.
        width: of the embedding of a token, all heads together.
        kernel: taps of the convolution, `hash.order` positions apart.
        norm: of keys, streams and what is convolved, each stream with weights of its own.
    """

    hidden_size: int
    num_streams: int
    width: int
    hash: NGramHash
    kernel: int
    norm: RMSNorm

    @property
    def columns(self) -> int:
        """Of all streams together."""
        return self.num_streams * self.hidden_size

    @property
    def state_sizes(self) -> list[int]:
        """Bytes of the convolution's inputs, and of the tokens before."""
        conv = conv_state_nbytes(self.columns, self.kernel, self.hash.order)
        return [conv, 4 * (self.hash.order - 1)]

    @property
    def state(self) -> StateShape:
        """Nothing that grows."""
        return StateShape(cell_nbytes=shares_nbytes(self.state_sizes))

    @property
    def demand(self) -> Demand:
        """The widest product; rows of the table, keys, streams and results as arrays."""
        arrays = 4 * self.columns + self.hidden_size + 4 * self.width + 8 * self.hash.num_heads
        return Demand(attention_width=max(self.columns, self.width), run_width=arrays)

    def parameters(self, prefix: str) -> list[Parameter]:
        """Projections, norms, filter, and the table, which is not loaded."""
        ple, norm = f"{prefix}ple.", self.norm
        heads = self.hash.num_heads
        return [
            *linear(f"{ple}key_proj", self.columns, self.width),
            *linear(f"{ple}value_proj", self.hidden_size, self.width),
            *(norm.parameter(f"{ple}norm_{each}", self.columns) for each in _NORMS),
            Parameter(f"{ple}conv1d.weight", (self.columns, 1, self.kernel), "filter"),
            Parameter(
                f"{ple}ple_embedding.ngram_embedding.weight",
                (self.hash.num_rows, self.width // heads),
                "table",
                rows_per_token=heads,
            ),
        ]

    def bind(self, site: Site) -> BoundNGramEmbedding:
        """Join it to its weights, its table and its share of the cells."""
        ple, weights = f"{site.prefix}ple.", site.weights
        kept, tokens = shares(site.state.cells, self.state_sizes)
        norms = [self.norm.bind(weights, f"{ple}norm_{each}") for each in _NORMS]
        key_norm, query_norm, conv_norm = (
            GroupNorm(self.hidden_size, norm.eps, norm.weight) for norm in norms
        )
        filters = weights.vector(f"{ple}conv1d.weight").reshape(self.columns, self.kernel)
        return BoundNGramEmbedding(
            layer=self,
            table=weights.table(f"{ple}ple_embedding.ngram_embedding.weight"),
            projections=Projections(
                (bind_linear(weights, f"{ple}key_proj"), bind_linear(weights, f"{ple}value_proj"))
            ),
            key_norm=key_norm,
            query_norm=query_norm,
            conv_norm=conv_norm,
            conv=ShortConv(filters, silu=True, dilation=self.hash.order),
            kept=kept,
            tokens=tokens,
        )


_NORMS = ("key", "query", "conv")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BoundNGramEmbedding(BoundSublayer):
    """Such an embedding, ready to compute.

    Attributes:
        tokens: where the tokens before are kept, each plus one: 0 is none.
    """

    layer: NGramEmbedding
    table: Rows
    projections: Projections
    key_norm: GroupNorm
    query_norm: GroupNorm
    conv_norm: GroupNorm
    conv: ShortConv
    kept: CellLayer
    tokens: CellLayer

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """See `BoundSublayer.step`; `x` and `y` are streams `[T, n D]`.

        Raises:
            ReadError: the disk failed for a row of the table.
        """
        for rows, run in step.runs():
            self._run(run, x[rows], y[rows])

    def _run(self, step: Step, x: Floats, y: Floats) -> None:
        kernels, layer, num = step.kernels, self.layer, self.layer.num_streams
        found = self.table.rows(self._rows(step.ids, step.batch)).reshape(len(x), -1)
        key, value = kernels.project(self.projections, found)
        query = kernels.norm_rows(self.query_norm, x)
        match = kernels.match_streams(kernels.norm_rows(self.key_norm, key), query, num)
        match *= np.float32(layer.hidden_size**-0.5)
        match = np.sign(match) * np.sqrt(np.maximum(np.abs(match), np.float32(1e-6)))
        gated = np.zeros_like(x)
        kernels.write_gated(kernels.activate("sigmoid", match), value, gated)
        convolved = kernels.norm_rows(self.conv_norm, gated)
        kernels.short_conv(self.conv, convolved, step.batch, self.kept)
        y += gated
        y += convolved

    def _rows(self, ids: Ints, batch: Batch) -> NDArray[np.int64]:
        """Rows `[T, heads]` of the table; remembers each sequence's last tokens."""
        hashed = self.layer.hash
        rows = np.empty((len(ids), hashed.num_heads), np.int64)
        for member in np.unique(batch.members):
            here = np.flatnonzero(batch.members == member)
            cell = cell_of(self.tokens, int(batch.cells[member]), np.int32)
            before = np.where(cell > 0, cell.astype(np.int64) - 1, hashed.end)
            history = np.concatenate([before, ids[here].astype(np.int64)])
            rows[here] = hashed.rows(history)
            cell[:] = history[len(here) :] + 1
        return rows
