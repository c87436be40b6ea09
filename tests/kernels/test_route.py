"""Routing: scores, choice and weights against the reference; the same choice everywhere."""

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import F32, FORMATS
from colibri.kernels.api import Limits, NonFiniteRow, Router
from colibri.kernels.native import NativeKernels
from tests.examples import examples
from tests.kernels.builders import (
    REFERENCE,
    TOKENS,
    assert_close,
    assert_same_bits,
    gaussian,
    generator,
    matrix,
    native,
    norm,
    router,
    variants,
)


@settings(max_examples=examples(50), deadline=None)
@given(
    name=st.sampled_from(["f32", "bf16", "int8-g32"]),
    num=st.integers(1, 32),
    tokens=st.sampled_from(TOKENS),
    normalize=st.booleans(),
    data=st.data(),
)
def test_route_step(name: str, num: int, tokens: int, normalize: bool, data: Any) -> None:
    rng = generator(data.draw(st.integers(0, 2**32 - 1)))
    active = data.draw(st.integers(1, num))
    layer = router(rng, FORMATS[name], 40, num, active, normalize)
    x = gaussian(rng, tokens, 40)
    wanted, found = REFERENCE.route_step(layer, x), native("float32").route_step(layer, x)
    assert_close(found.hidden, wanted.hidden, 1e-6)
    assert_close(found.weights, wanted.weights, 1e-4)
    np.testing.assert_array_equal(found.experts, np.unique(found.ids))
    for kernels in variants("float32"):
        again = kernels.route_step(layer, x)
        np.testing.assert_array_equal(again.ids, found.ids)
        assert_same_bits(again.weights, found.weights)
        assert_same_bits(again.hidden, found.hidden)


def test_the_choice_of_the_reference() -> None:
    rng = generator(5)
    layer = router(rng, F32, 64, 32, 8, True)
    x = gaussian(rng, 33, 64)
    wanted, found = REFERENCE.route_step(layer, x), native().route_step(layer, x)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.experts, wanted.experts)


@pytest.mark.parametrize("active", [1, 6, 1024])
def test_a_thousand_experts(active: int) -> None:
    rng = generator(5)
    layer = router(rng, F32, 16, 1024, active, False)
    kernels = NativeKernels(threads=1)
    kernels.reserve(Limits(2, 16, 16, 16, 1024, active, 16))
    x = gaussian(rng, 2, 16)
    found = kernels.route_step(layer, x)
    wanted = REFERENCE.route_step(layer, x)
    assert_close(found.weights, wanted.weights, 1e-5)
    np.testing.assert_array_equal(found.experts, np.unique(found.ids))
    np.testing.assert_array_equal(found.ids[:, :6], wanted.ids[:, :6])


@pytest.mark.parametrize("active", [1, 3, 8])
def test_ties_go_to_the_lowest_id(active: int) -> None:
    rng = generator(6)
    gate = matrix(rng, F32, 8, 16, shift=0)
    rows = gate.data.view(np.float32).reshape(8, 16)
    rows[:] = rows[0]
    found = native().route_step(Router(norm(rng, 16), gate, active, True), gaussian(rng, 2, 16))
    np.testing.assert_array_equal(found.ids, [list(range(active))] * 2)
    np.testing.assert_allclose(found.weights, 1 / active, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_named(value: float) -> None:
    rng = generator(7)
    x = gaussian(rng, 5, 16)
    x[3, 2] = value
    for name in ("f32", "int8-g32"):
        with pytest.raises(NonFiniteRow) as caught:
            native().route_step(router(rng, FORMATS[name], 16, 8, 2, True), x)
        assert caught.value.row == 3


@settings(max_examples=examples(80), deadline=None)
@given(
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    groups=st.sampled_from([1, 2, 4, 8]),
    group_top=st.integers(1, 3),
    size=st.integers(1, 9),
    tokens=st.sampled_from([1, 5, 17]),
    biased=st.booleans(),
    data=st.data(),
)
def test_other_routers(
    scoring: Literal["softmax", "sigmoid"],
    groups: int,
    group_top: int,
    size: int,
    tokens: int,
    biased: bool,
    data: Any,
) -> None:
    rng = generator(data.draw(st.integers(0, 2**32 - 1)))
    used = data.draw(st.integers(1, groups))
    num, active = groups * size, data.draw(st.integers(1, used * size))
    options = {
        "scoring": scoring,
        "num_groups": groups,
        "num_groups_used": used,
        "group_top": group_top,
        "bias": gaussian(rng, num) / 4 if biased else None,
        "epsilon": data.draw(st.sampled_from([0.0, 1e-20, 0.5])),
        "factor": data.draw(st.sampled_from([1.0, 2.5])),
    }
    layer = router(rng, F32, 40, num, active, data.draw(st.booleans()), **options)
    x = gaussian(rng, tokens, 40)
    wanted, found = REFERENCE.route_step(layer, x), native("float32").route_step(layer, x)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.experts, wanted.experts)
    assert_close(found.weights, wanted.weights, 1e-5)
    for kernels in variants("float32"):
        again = kernels.route_step(layer, x)
        np.testing.assert_array_equal(again.ids, found.ids)
        assert_same_bits(again.weights, found.weights)


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    rng = generator(3)
    bias = np.zeros(8, np.float32)
    bias[5] = 9
    plain = router(rng, F32, 16, 8, 8, False, scoring="sigmoid")
    x = gaussian(rng, 1, 16)
    scores = native().route_step(plain, x)
    chosen = native().route_step(Router(plain.norm, plain.gate, 1, False, "sigmoid", bias), x)
    assert chosen.ids[0, 0] == 5
    assert chosen.weights[0, 0] == scores.weights[0, scores.ids[0] == 5]


@pytest.mark.parametrize(
    "options",
    [
        {"num_groups": 3},
        {"num_groups": 4, "num_groups_used": 5},
        {"num_groups": 4, "num_groups_used": 1},
        {"group_top": 0},
        {"bias": np.full(8, np.nan, np.float32)},
        {"bias": np.zeros(7, np.float32)},
    ],
)
def test_routers_that_contradict_themselves_are_refused(options: dict[str, Any]) -> None:
    rng = generator(4)
    layer = router(rng, F32, 16, 8, 3, False, **options)
    with pytest.raises(ValueError, match=r"experts|bias"):
        native().route_step(layer, gaussian(rng, 1, 16))


@settings(max_examples=examples(30))
@given(
    num=st.integers(1, 20),
    shared=st.integers(1, 4),
    tokens=st.sampled_from(TOKENS),
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    normalize=st.booleans(),
    data=st.data(),
)
def test_shared_experts_are_weighed_but_not_chosen(
    num: int,
    shared: int,
    tokens: int,
    scoring: Literal["sigmoid", "softmax"],
    normalize: bool,
    data: Any,
) -> None:
    rng = generator(data.draw(st.integers(0, 2**32 - 1)))
    active, options = data.draw(st.integers(1, num)), {"scoring": scoring, "factor": 2.5}
    layer = router(
        rng, F32, 40, num + shared, active, normalize, num_shared=shared,
        bias=gaussian(rng, num), **options,
    )  # fmt: skip
    x = gaussian(rng, tokens, 40)
    wanted, found = REFERENCE.route_step(layer, x), native("float32").route_step(layer, x)
    assert found.shared is not None
    assert wanted.shared is not None
    assert found.ids.max() < num
    assert_close(found.weights, wanted.weights, 1e-4)
    assert_close(found.shared, wanted.shared, 1e-4)
    if normalize:
        total = found.weights.sum(axis=1) + found.shared.sum(axis=1)
        np.testing.assert_allclose(total, 2.5, rtol=1e-5)
    for kernels in variants("float32"):
        again = kernels.route_step(layer, x)
        assert again.shared is not None
        assert_same_bits(again.weights, found.weights)
        assert_same_bits(again.shared, found.shared)
