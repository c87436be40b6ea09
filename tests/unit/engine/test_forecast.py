"""Chunks that are sized by how long they will take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from colibri.engine.forecast import PassForecast
from colibri.engine.request import SamplingParams
from tests.unit.engine.counter import CounterModel, make_engine
from tests.unit.engine.test_scheduler import ask

COSTS: dict[str, Callable[[int], float]] = {
    "linear": lambda rows: 0.01 + 0.004 * rows,
    "shared experts": lambda rows: 0.02 * rows**0.5,
    "one price": lambda _rows: 0.1,
}


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_it_finds_the_largest_chunk_in_time(cost: Callable[[int], float]) -> None:
    forecast = PassForecast()
    rows = 0
    for _ in range(20):
        rows = forecast.rows_within(0.5, 8, 4096)
        assert cost(rows) <= 0.5 * 1.1
        forecast.observe(rows, cost(rows))
    best = max(n for n in range(8, 4097) if cost(n) <= 0.5)
    assert rows >= 0.75 * best


def test_it_starts_with_the_least_and_never_goes_below() -> None:
    forecast = PassForecast()
    assert forecast.seconds(5) is None
    assert forecast.rows_within(1.0, 8, 512) == 8
    forecast.observe(8, 30.0)
    assert forecast.rows_within(1.0, 8, 512) == 8
    assert forecast.rows_within(1.0, 8, 4) == 4


def test_it_forgets() -> None:
    forecast = PassForecast()
    forecast.observe(8, 30.0)
    for _ in range(8):
        forecast.observe(8, 0.01)
    assert forecast.rows_within(1.0, 8, 512) == 16


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.15], ids=lambda noise: f"noise {noise:.0%}")
def test_pauses_stay_near_the_one_allowed(noise: float) -> None:
    """A prompt of 4,096 whose attention grows, on a drive that varies; decoding goes on beside."""
    random, forecast = np.random.RandomState(3), PassForecast()
    position, pauses = 0, []
    while position < 4096:
        rows = forecast.rows_within(2.0, 10, 512)
        usual = 0.15 + 0.03 * rows**0.8 + 2e-6 * rows * position
        pauses.append(usual * (1 + noise * random.uniform(-1, 1)))
        forecast.observe(rows, pauses[-1])
        position += rows - 2
    assert np.quantile(pauses, 0.99) <= 1.2 * 2.0
    assert np.median(pauses) >= (1 - noise) * 0.85 * 2.0


def test_prompts_are_cut_so_that_replies_go_on() -> None:
    """A clock that a pass moves on by 10 ms a row; a reply waits at most 0.3 s for its token."""
    now = [0.0]
    model = CounterModel()
    engine = make_engine(
        model,
        context_length=512,
        max_sessions=2,
        prefill_chunk=400,
        max_stall_s=0.3,
        clock=lambda: now[0],
    )
    forward = model.forward

    def timed(ids, *args, **kwargs):  # type: ignore[no-untyped-def]
        now[0] += 0.01 * len(ids)
        return forward(ids, *args, **kwargs)

    model.forward = timed  # type: ignore[method-assign]
    ask(engine, [1], SamplingParams(max_tokens=100))
    engine.step()
    ask(engine, [2] * 300)
    while engine.step():
        pass
    chunks = [batch[1] for batch in model.batches if len(batch) == 2 and batch[1] > 1]
    assert chunks[0] >= 8
    assert max(sum(batch) for batch in model.batches[1:]) <= 30
    assert max(chunks) >= 28
