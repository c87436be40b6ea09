import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from colibri.engine.request import SamplingParams
from colibri.engine.sampler import (
    Sampler,
    divide_by_temperature,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_seen,
    softmax,
)
from colibri.errors import NumericsError

LOGITS = hnp.arrays(
    np.float64,
    st.integers(1, 30),
    elements=st.floats(-50, 50, width=16) | st.sampled_from([0.0, 1.0]),
)


def draw(logits: list[float], n: int = 1, **params: object) -> list[int]:
    sampler = Sampler(SamplingParams(**params), [], len(logits))  # type: ignore[arg-type]
    return [sampler.choose(np.asarray(logits, np.float32)) for _ in range(n)]


def kept(logits: NDArray[np.float64]) -> list[int]:
    return np.flatnonzero(np.isfinite(logits)).tolist()


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert draw([1, 3, 3, 2]) == [1]


@given(LOGITS, st.integers(1, 40))
def test_top_k_keeps_k_and_breaks_ties_by_id(logits: NDArray[np.float64], k: int) -> None:
    expected = sorted(np.argsort(-logits, kind="stable")[:k].tolist())
    assert kept(keep_top_k(logits, k)) == expected


@given(LOGITS, st.floats(0, 1))
def test_top_p_keeps_the_shortest_head_that_reaches_p(
    logits: NDArray[np.float64], p: float
) -> None:
    probabilities = softmax(logits)
    ids = kept(keep_top_p(logits, p))
    assert probabilities[ids].sum() >= p - 1e-12
    smallest = min(ids, key=lambda i: (probabilities[i], -i))
    assert len(ids) == 1 or probabilities[ids].sum() - probabilities[smallest] < p + 1e-12
    others = set(range(len(logits))) - set(ids)
    assert all(probabilities[i] <= probabilities[smallest] for i in others)


def test_top_p_of_zero_keeps_one() -> None:
    assert kept(keep_top_p(np.array([1.0, 3.0, 3.0]), 0.0)) == [1]


def test_top_p_after_top_k_renormalizes() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    # Of the two that are kept the first has 4/7, which reaches 0.5 though 0.4 does not.
    assert kept(keep_top_p(keep_top_k(logits, 2), 0.5)) == [0]


def test_min_p_is_relative_to_the_most_likely() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    assert kept(keep_min_p(logits, 0.5)) == [0, 1]
    assert kept(keep_min_p(logits, 1.0)) == [0]


def test_repetition_penalty_moves_both_signs_away() -> None:
    seen = np.array([True, True, False])
    assert penalize_seen(np.array([2.0, -2.0, 2.0]), seen, 2.0).tolist() == [1.0, -4.0, 2.0]


def test_repetition_penalty_counts_the_prompt() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [1], 3)
    assert sampler.choose(np.array([2.5, 3, 2], np.float32)) == 0


def test_presence_and_frequency_penalties_count_the_reply() -> None:
    assert draw([1.0, 0.9, 0.0], 3, presence_penalty=0.5) == [0, 1, 0]
    assert draw([1.0, 0.7, 0.0], 4, frequency_penalty=0.2) == [0, 0, 1, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-9, 1.0, 1e9])
def test_every_temperature_gives_probabilities(temperature: float) -> None:
    probabilities = softmax(divide_by_temperature(np.array([1e30, 0.0, -1e30]), temperature))
    assert np.isfinite(probabilities).all()
    assert probabilities.sum() == pytest.approx(1)


def test_a_tiny_temperature_is_greedy() -> None:
    assert draw([1, 3, 2], 20, temperature=1e-9, seed=0) == [1] * 20


def test_frequencies_follow_the_probabilities() -> None:
    tokens = draw(np.log([0.5, 0.3, 0.2]).tolist(), 4000, temperature=1.0, seed=1)
    shares = np.bincount(tokens, minlength=3) / 4000
    assert np.abs(shares - [0.5, 0.3, 0.2]).max() < 0.03


def test_tokens_without_probability_are_never_drawn() -> None:
    assert set(draw([0.0, 1.0, 0.9, 0.0], 500, temperature=1.0, top_k=2, seed=2)) == {1, 2}


def test_the_same_seed_gives_the_same_tokens_whatever_else_runs() -> None:
    logits = [0.1 * i for i in range(20)]
    alone = draw(logits, 30, temperature=1.0, seed=7)
    ours, theirs = (Sampler(SamplingParams(temperature=1.0, seed=s), [], 20) for s in (7, 8))
    together = []
    for _ in range(30):
        together.append(ours.choose(np.asarray(logits, np.float32)))
        theirs.choose(np.asarray(logits, np.float32))
    assert together == alone
    assert draw(logits, 30, temperature=1.0, seed=8) != alone


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(NumericsError, match="the logit of token 1 is"):
        draw([0.0, bad, 0.0])


@pytest.mark.parametrize("penalty", [5e-324, 1e-308, 1e308])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0, 1e308])
def test_no_penalty_leaves_the_numbers(penalty: float, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, repetition_penalty=penalty, top_p=0.9, min_p=0.1, seed=1
    )
    sampler = Sampler(params, [0, 1], 4)
    for _ in range(8):
        assert 0 <= sampler.choose(np.asarray([3, -3, 2, 0.5], np.float32)) < 4


def test_logit_bias_is_added_before_everything_else() -> None:
    params = SamplingParams(logit_bias={2: 5.0, 0: -100})
    assert Sampler(params, [], 4).choose(np.asarray([3, 1, -1, 2], np.float32)) == 2
    assert Sampler(params, [], 4).choose(np.asarray([3, 1, -9, 2], np.float32)) == 3
