"""From logits to one token: a list of functions logits -> logits, then a seeded choice.

Everything is float64 and belongs to one request, so that the same seed gives the same tokens
whatever else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from colibri.engine.request import SamplingParams
from colibri.errors import NumericsError

Logits = NDArray[np.float64]  # [V]
Transform = Callable[[Logits], Logits]

_LARGEST = 1e300


class Sampler:
    """Chooses the tokens of one reply.

    Args:
        params: what was asked for.
        prompt: ids of the prompt, which the repetition penalty counts too.
        vocab_size: V.
        index: of the reply among those to one prompt; each has random numbers of its own.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, index: int = 0
    ) -> None:
        self._counts = np.zeros(vocab_size, np.int64)  # [V] how often each id is in the reply
        self._seen = np.zeros(vocab_size, np.bool_)  # [V] whether it is in prompt or reply
        self._seen[np.asarray(prompt, np.int64)] = True
        self._greedy = params.temperature == 0
        self._penalties, self._filters = self._penalties_of(params), _filters(params)
        self._random = np.random.Generator(np.random.PCG64(_seed(params.seed, index)))

    def choose(self, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None = None) -> int:
        """Choose a token from `logits [V]`, one of those `allowed [V]`, and remember it.

        Raises:
            NumericsError: a logit is not finite.
        """
        if not np.isfinite(logits).all():
            token = int(np.flatnonzero(~np.isfinite(logits))[0])
            raise NumericsError(f"the logit of token {token} is {logits[token]}, not finite")
        if self._greedy and not self._penalties and allowed is None:
            return self._accept(int(logits.argmax()))
        values = logits.astype(np.float64)
        for transform in self._penalties:
            values = transform(values)
        if allowed is not None:
            values[~allowed] = -np.inf
        for transform in self._filters:
            values = transform(values)
        return self._accept(int(values.argmax()) if self._greedy else self._draw(values))

    def force(self, token: int) -> int:
        """Remember a token without a choice; random numbers go on as if it had been chosen."""
        if not self._greedy:
            self._random.random()
        return self._accept(token)

    def _accept(self, token: int) -> int:
        self._counts[token] += 1
        self._seen[token] = True
        return token

    def _draw(self, logits: Logits) -> int:
        cumulated = np.cumsum(softmax(logits))
        total = cumulated[-1]
        # The product may round up to the total; "right" steps over tokens of probability zero.
        point = min(self._random.random() * total, np.nextafter(total, 0))
        return int(np.searchsorted(cumulated, point, side="right"))

    def _penalties_of(self, params: SamplingParams) -> list[Transform]:
        transforms: list[Transform] = []
        if params.repetition_penalty != 1:
            transforms.append(lambda x: penalize_seen(x, self._seen, params.repetition_penalty))
        if params.presence_penalty:
            transforms.append(lambda x: x - params.presence_penalty * (self._counts > 0))
        if params.frequency_penalty:
            transforms.append(lambda x: x - params.frequency_penalty * self._counts)
        if params.logit_bias:
            biased = np.fromiter(params.logit_bias, np.int64)
            biases = np.fromiter(params.logit_bias.values(), np.float64)
            transforms.append(lambda x: add_bias(x, biased, biases))
        return transforms


def _seed(seed: int | None, index: int) -> int | np.random.SeedSequence | None:
    """Of a reply's own random numbers; those of the first are the seed's."""
    return np.random.SeedSequence(seed, spawn_key=(index,)) if index else seed


def _filters(params: SamplingParams) -> list[Transform]:
    """Temperature first, then what removes tokens; greedy decoding needs none of them."""
    if params.temperature == 0:
        return []
    filters: list[Transform] = [lambda x: divide_by_temperature(x, params.temperature)]
    if params.top_k:
        filters.append(lambda x: keep_top_k(x, params.top_k))
    if params.top_p < 1:
        filters.append(lambda x: keep_top_p(x, params.top_p))
    if params.min_p > 0:
        filters.append(lambda x: keep_min_p(x, params.min_p))
    return filters


def softmax(logits: Logits) -> Logits:
    """Probabilities of `logits [V]`; a logit of -inf has none."""
    weights: Logits = np.exp(logits - logits.max())
    probabilities: Logits = weights / weights.sum()
    return probabilities


def penalize_seen(logits: Logits, seen: NDArray[np.bool_], penalty: float) -> Logits:
    """Divide positive and multiply negative logits of the tokens in `seen [V]`."""
    with np.errstate(over="ignore"):
        penalized = np.where(logits > 0, logits / penalty, logits * penalty)
    # Finite, so that differences of two stay numbers whatever the penalty is.
    return np.where(seen, np.clip(penalized, -_LARGEST, _LARGEST), logits)


def add_bias(logits: Logits, tokens: NDArray[np.int64], biases: Logits) -> Logits:
    """Add `biases [N]` to the logits of `tokens [N]`, each of which is named once."""
    biased = logits.copy()
    biased[tokens] += biases
    return biased


def divide_by_temperature(logits: Logits, temperature: float) -> Logits:
    """Sharpen or flatten; the largest logit becomes 0 first, so that no temperature overflows."""
    with np.errstate(over="ignore"):
        scaled: Logits = (logits - logits.max()) / temperature
    return scaled


def keep_top_k(logits: Logits, k: int) -> Logits:
    """Remove all but the `k` largest logits, ties to the lowest id."""
    if k >= logits.size:
        return logits
    smallest_kept = np.partition(logits, -k)[-k]
    keep = logits > smallest_kept
    tied = np.flatnonzero(logits == smallest_kept)
    keep[tied[: k - np.count_nonzero(keep)]] = True
    return np.where(keep, logits, -np.inf)


def keep_top_p(logits: Logits, p: float) -> Logits:
    """Keep the fewest most likely tokens that reach probability `p`, at least one."""
    probabilities = softmax(logits)
    # Tokens below (1 - p) / V have less than 1 - p together: the nucleus never needs them.
    candidates = np.flatnonzero(probabilities >= min((1 - p) / logits.size, probabilities.max()))
    order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    reached = np.cumsum(probabilities[order])
    kept = order[: int(np.searchsorted(reached, p)) + 1]
    result = np.full_like(logits, -np.inf)
    result[kept] = logits[kept]
    return result


def keep_min_p(logits: Logits, p: float) -> Logits:
    """Remove tokens less likely than `p` times the most likely one."""
    return np.where(logits >= logits.max() + np.log(p), logits, -np.inf)
