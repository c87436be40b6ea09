"""The forecast against a plain model of it, and against itself asked at other times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.memory.policies_forecast import _FIRST_WEIGHTS, HALF_LIVES, Forecast

LAYERS, EXPERTS, ACTIVE = 3, 8, 2


def keys(layer: int, *experts: int) -> np.ndarray:
    return np.array(sorted(experts), np.int64) + layer * EXPERTS


def touches(seed: int, num_tokens: int) -> list[np.ndarray]:
    """Skewed choices, layer after layer; now and then a layer is passed over."""
    random = np.random.default_rng(seed)
    chance = 1 / np.arange(1, EXPERTS + 1)
    chance /= chance.sum()
    return [
        keys(layer, *random.choice(EXPERTS, ACTIVE, replace=False, p=np.roll(chance, layer)))
        for _ in range(num_tokens)
        for layer in range(LAYERS)
        if random.random() < 0.95
    ]


def test_heats_are_averages_over_the_visits_of_a_layer() -> None:
    forecast = Forecast(LAYERS, EXPERTS, ACTIVE)
    heats = np.full((LAYERS, len(HALF_LIVES), EXPERTS), ACTIVE / EXPERTS)
    decay = 0.5 ** (1 / np.array(HALF_LIVES))
    for used in touches(0, 8):  # fewer visits than it takes to fit the weights
        forecast.touch(used)
        layer, experts = used[0] // EXPERTS, used % EXPERTS
        for s, d in enumerate(decay):
            heats[layer, s] *= d
            heats[layer, s, experts] += 1 - d
    likely = np.einsum("lse,s->le", heats, np.array(_FIRST_WEIGHTS))
    last = used[0] // EXPERTS
    distance = (np.arange(LAYERS) - last - 1) % LAYERS + 1
    expected = likely * ((distance / LAYERS) ** -0.3)[:, None]
    assert np.allclose(forecast.scores(), expected.ravel(), atol=1e-9)


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), asked=st.sets(st.integers(0, 300), max_size=40))
def test_asking_changes_nothing(seed: int, asked: set[int]) -> None:
    """Else a smaller arena, which asks more often, would rank differently."""
    one, other = Forecast(LAYERS, EXPERTS, ACTIVE), Forecast(LAYERS, EXPERTS, ACTIVE)
    for number, used in enumerate(touches(seed, 110)):
        one.touch(used)
        other.touch(used)
        if number in asked:
            one.victims(2, np.arange(9, 20))
    assert np.array_equal(one.scores(), other.scores())
    assert np.array_equal(one._weights, other._weights)
    assert not np.array_equal(one._weights, _FIRST_WEIGHTS)


def test_victims_are_those_of_the_scores() -> None:
    forecast = Forecast(LAYERS, EXPERTS, ACTIVE)
    for used in touches(1, 40):
        forecast.touch(used)
    forecast.hint(keys(1, 3, 5))
    allowed = np.random.default_rng(0).permutation(LAYERS * EXPERTS)[:15]
    found = allowed[forecast.victims(6, allowed)]
    assert found.tolist() == sorted(allowed, key=lambda key: forecast.scores()[key])[:6]
    assert len(np.unique(forecast.scores())) == LAYERS * EXPERTS


def test_a_hint_holds_until_the_layer_has_had_its_turn() -> None:
    forecast = Forecast(LAYERS, EXPERTS, ACTIVE)
    forecast.touch(keys(0, 1, 2))
    forecast.hint(keys(1, 6, 7))
    others = [key for key in range(LAYERS * EXPERTS) if key not in (14, 15)]
    assert set(forecast.victims(22, np.arange(24)).tolist()) == set(others)
    forecast.touch(keys(1, 0, 1))  # a large turn comes in several touches
    assert not {14, 15} & set(forecast.victims(22, np.arange(24)).tolist())
    forecast.touch(keys(1, 6))
    assert 14 in forecast.victims(23, np.arange(24))
    assert 15 not in forecast.victims(23, np.arange(24))
    forecast.touch(keys(2, 0, 1))
    assert 15 in forecast.victims(20, np.arange(24))


def test_weights_follow_the_model() -> None:
    """Where only the last token matters, the shortest heat gets the weight."""
    random = np.random.default_rng(3)
    forecast = Forecast(1, 16, 2)
    used = np.array([0, 1])
    for _ in range(4000):
        if random.random() < 0.1:
            used = np.sort(random.choice(16, 2, replace=False))
        forecast.touch(used)
    forecast.scores()
    assert forecast._weights[0] > 0.5
    assert forecast._weights[0] == max(forecast._weights)


@pytest.mark.parametrize("known", [[0, 1, 2], [1]])
def test_a_seed_sets_the_order_until_more_is_known(known: list[int]) -> None:
    counts = np.zeros((LAYERS, EXPERTS))
    counts[known] = np.arange(1, EXPERTS + 1)
    forecast = Forecast(LAYERS, EXPERTS, ACTIVE)
    forecast.seed(counts)
    for layer in range(LAYERS):
        own = forecast.victims(EXPERTS, np.arange(EXPERTS) + layer * EXPERTS)
        assert own.tolist() == list(range(EXPERTS))
        spread = np.ptp(forecast.scores()[own + layer * EXPERTS])
        assert spread > 0.1 if layer in known else spread < 1e-6
