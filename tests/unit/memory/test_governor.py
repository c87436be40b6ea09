"""Whether the governor finds out what pays, with times that are made up."""

import numpy as np
import pytest

from colibri.memory.governor import Governor, Trial, gain
from tests.unit.memory.virtual import Decoding


def run(trial: Trial, factor: float, steps: int, seed: int = 0) -> int:
    """Steps whose time is `factor` of what it would be without; how many had it on."""
    random = np.random.default_rng(seed)
    num_on = 0
    for _ in range(steps):
        demand = random.integers(0, 20)
        on = trial.choice
        num_on += on
        noise = random.normal(1, 0.03)
        trial.book((1.0 + 0.2 * demand) * (factor if on else 1.0) * noise, float(demand))
    return num_on


def test_it_starts_off() -> None:
    trial = Trial()
    assert run(trial, 0.5, 6) == 0
    assert trial.is_probing
    assert run(trial, 0.5, 6) == 0
    assert run(trial, 0.5, 6) == 6


@pytest.mark.parametrize(
    ("factor", "pays"), [(0.8, True), (0.93, True), (1.0, False), (1.2, False)]
)
def test_it_finds_out_what_pays(factor: float, pays: bool) -> None:
    trial = Trial()
    run(trial, factor, 54)
    assert not trial.is_probing
    assert trial.pays is pays
    assert trial.gain == pytest.approx(1 - factor, abs=0.04)


def test_what_does_not_pay_costs_little() -> None:
    trial = Trial()
    num_on = run(trial, 2.0, 5000)
    assert not trial.pays
    assert num_on < 0.05 * 5000


def test_it_changes_its_mind() -> None:
    trial = Trial()
    run(trial, 0.8, 200)
    assert trial.pays
    run(trial, 1.3, 6 * 300)
    assert not trial.pays


def test_a_known_verdict_holds_from_the_first_step() -> None:
    trial = Trial(True, 0.2)
    assert run(trial, 0.8, 90) == 90
    assert Governor(Trial(True, 0.2)).depth == 1
    assert Governor(Trial(True, 0.2), Trial(True, 0.1)).depth == 2
    assert Governor(None, Trial(True, 0.1)).depth == 0


def test_demand_is_not_mistaken_for_a_gain() -> None:
    """Steps with it happened to want much less of the disk."""
    demands = np.arange(20.0)
    without = [(1 + 0.1 * (d + 10), d + 10) for d in demands]
    trial = [(1 + 0.1 * d, d) for d in demands]
    found = gain(without, trial)
    assert found is not None
    assert found.share == pytest.approx(0, abs=1e-9)


def test_a_step_that_was_held_up_decides_nothing() -> None:
    steps = [(1.0, 0.0)] * 20
    found = gain(steps, [*steps, (1000.0, 0.0)])
    assert found is not None
    assert found.share > -0.15


def test_too_few_steps_say_nothing() -> None:
    assert gain([(1.0, 0.0)] * 3, [(1.0, 0.0)] * 30) is None


SMALL = {"layers": 6, "experts": 16, "active": 4, "share": 0.3}


def test_it_is_on_where_good_predictions_hide_reads() -> None:
    model = Decoding(**SMALL, recall=0.95, record_s=0.3)  # type: ignore[arg-type]
    times, ahead, _ = model.decode("auto", 120)
    assert ahead.governor.first.pays
    assert sum(times[60:]) < 0.95 * sum(model.decode("off", 120)[0][60:])


def test_it_is_off_where_bad_predictions_take_the_disk() -> None:
    model = Decoding(**SMALL, recall=0.2, record_s=1.5)  # type: ignore[arg-type]
    times, ahead, _ = model.decode("auto", 120)
    assert not ahead.governor.first.pays
    assert times[60:] == pytest.approx(model.decode("off", 120)[0][60:], rel=0.5)
    assert sum(model.decode("on", 120)[0][60:]) > 1.05 * sum(times[60:])
