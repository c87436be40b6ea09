"""An interpolated 5-gram model with modified Kneser-Ney smoothing, in NumPy.

The yardstick the demo model has to beat.  An n-gram is one integer: twelve bits a token, the last
token lowest.  Every order keeps its n-grams sorted, so a lookup is a binary search and the n-grams
that share a context are neighbours.

    P(w | h) = max(c(hw) - D(c(hw)), 0) / c(h.) + g(h) P(w | h without its first token)
    g(h)     = (D1 N1(h.) + D2 N2(h.) + D3 N3+(h.)) / c(h.)

c counts occurrences in the highest order and distinct left neighbours below; D1, D2 and D3 come
from the numbers of n-grams seen once to four times (Chen and Goodman, 1999).  Below the unigrams
stands the uniform distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BITS = 12
ORDER = 5

Keys = NDArray[np.uint64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Order:
    """The n-grams of one order; `grams` [G] and `contexts` [C] are sorted."""

    grams: Keys
    kept: Floats  # [G] count less discount
    contexts: Keys
    totals: Floats  # [C] c(h.)
    backoff: Floats  # [C] g(h)


def keys_of(tokens: NDArray[np.uint16], order: int) -> Keys:
    """Tokens [n] -> the n-gram ending at each position from `order`-1 on, [n - order + 1]."""
    wide = tokens.astype(np.uint64)
    out = np.zeros(len(tokens) - order + 1, dtype=np.uint64)
    for i in range(order):
        out = (out << np.uint64(BITS)) | wide[i : len(wide) - order + 1 + i]
    return out


def discounts(counts: NDArray[np.int64]) -> Floats:
    """Counts [G] -> D0 (zero), D1, D2, D3, from the numbers of n-grams seen 1, 2, 3, 4 times."""
    seen = np.bincount(np.minimum(counts, 5), minlength=6).astype(np.float64)
    y = seen[1] / max(seen[1] + 2 * seen[2], 1.0)
    out = [0.0]
    for i in (1, 2, 3):
        wanted = i - (i + 1) * y * seen[i + 1] / seen[i] if seen[i] else 0.5 * i
        out.append(float(np.clip(wanted, 0.05, i)))
    return np.asarray(out)


def order_of(grams: Keys, counts: NDArray[np.int64]) -> Order:
    """Discounted counts and back-off weights of one order's sorted n-grams."""
    d = discounts(counts)
    level = np.minimum(counts, 3)
    contexts, start = np.unique(grams >> np.uint64(BITS), return_index=True)
    totals = np.add.reduceat(counts, start).astype(np.float64)
    backoff = np.add.reduceat(d[level], start) / totals
    return Order(grams, counts - d[level], contexts, totals, backoff)


class Ngram:
    """Trained on one or more token streams; n-grams do not run from one into the next."""

    def __init__(self, streams: list[NDArray[np.uint16]], vocab: int) -> None:
        if vocab > 1 << BITS:
            raise ValueError(f"the vocabulary of {vocab} does not fit {BITS} bits")
        self.vocab = vocab
        self.orders: list[Order] = []
        grams, counts = np.unique(
            np.concatenate([keys_of(s, ORDER) for s in streams]), return_counts=True
        )
        for order in range(ORDER, 0, -1):
            self.orders.append(order_of(grams, counts))
            mask = np.uint64((1 << BITS * (order - 1)) - 1)
            grams, counts = np.unique(grams & mask, return_counts=True)
        self.orders.reverse()

    def probabilities(self, tokens: NDArray[np.uint16]) -> Floats:
        """P of tokens [n] each after the four before it: [n - 4], for positions 4 to n-1."""
        full = keys_of(tokens, ORDER)
        p = np.full(len(full), 1.0 / self.vocab)
        for n, order in enumerate(self.orders, start=1):
            grams = full & np.uint64((1 << BITS * n) - 1)
            at, known = find(order.contexts, grams >> np.uint64(BITS))
            total, back = order.totals[at], np.where(known, order.backoff[at], 1.0)
            place, seen = find(order.grams, grams)
            p = np.where(seen & known, order.kept[place] / total, 0.0) + back * p
        return p

    def loss(self, tokens: NDArray[np.uint16]) -> float:
        """Mean negative log probability in nats over the positions from 4 on."""
        return float(-np.log(self.probabilities(tokens)).mean())


def find(table: Keys, wanted: Keys) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Positions of `wanted` in a sorted table (clipped), and whether each is there."""
    at = np.searchsorted(table, wanted).clip(max=len(table) - 1)
    return at, table[at] == wanted
