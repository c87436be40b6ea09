"""Wide sublayers take the rows of a step in runs; the plan counts the arrays of one run."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from colibri.kernels.api import Batch
from colibri.models.blueprint import Blueprint
from colibri.nn.sublayer import RUN_ROWS, Demand, Step
from tests.tiny import FAMILIES, Family


def step(*lengths: int) -> Step:
    """Rows of so many tokens of each member."""
    positions = [np.arange(length, dtype=np.int32) for length in lengths]
    members = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    batch = Batch(np.concatenate(positions), members, np.zeros((len(lengths), 9), np.int32))
    nothing = cast(Any, SimpleNamespace())
    return Step(nothing, nothing, batch, np.arange(sum(lengths), dtype=np.int32))


@pytest.mark.parametrize("lengths", [(1,), (RUN_ROWS,), (3, RUN_ROWS - 3)])
def test_few_rows_are_one_run(lengths: tuple[int, ...]) -> None:
    whole = step(*lengths)
    assert whole.runs() == [(slice(None), whole)]


def test_runs_follow_each_other_and_are_kept() -> None:
    whole = step(200, 100, 1)
    runs = whole.runs()
    assert [len(run.ids) for _, run in runs] == [128, 128, 45]
    assert np.array_equal(np.concatenate([run.ids for _, run in runs]), whole.ids)
    for name in ("positions", "members"):
        found = np.concatenate([getattr(run.batch, name) for _, run in runs])
        assert np.array_equal(found, getattr(whole.batch, name))
    for rows, run in runs:
        assert np.array_equal(whole.ids[rows], run.ids)
    assert [run for _, run in whole.runs()] == [run for _, run in runs]


def test_arrays_of_a_run_do_not_grow_with_the_step() -> None:
    demand = Demand(array_width=10, run_width=1000)
    assert demand.array_floats(5) == 5 * 1010
    assert demand.array_floats(500) == 5000 + RUN_ROWS * 1000


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_one_sublayer_at_a_time_has_arrays(family: Family) -> None:
    blueprint = Blueprint.of(family.tiny_config())
    most, demand = blueprint.array_floats(512), blueprint.demand
    assert most <= demand.array_floats(512)
    assert blueprint.array_floats(1) <= most <= 512 * blueprint.array_floats(1)
