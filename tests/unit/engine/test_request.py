import math
import re
from typing import Any

import pytest

from colibri.engine.request import GenerateRequest, SamplingParams
from colibri.errors import RequestError


def test_defaults_are_greedy() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 0, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, "1", None, True)],
        *[("top_p", value) for value in (-0.1, 1.5, math.nan, "0.5")],
        *[("min_p", value) for value in (-0.1, 1.5, math.nan)],
        *[("top_k", value) for value in (-1, 1.5, None, True, "40", 2**63)],
        *[("repetition_penalty", value) for value in (0, -1.0, math.nan, math.inf)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, math.nan)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, math.nan)],
        *[("seed", value) for value in (-1, 2**64, 1.0, "1")],
        *[("max_tokens", value) for value in (-1, 5.0, "5", True)],
        *[("stop_ids", value) for value in ((-1,), ("a",), (1.0,))],
        ("ignore_eos", 1),
    ],
)
def test_refused_by_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{field} is {re.escape(repr(value))}: it must"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (0, 1e-9, 1e9, 5e-324)],
        *[("top_p", value) for value in (0, 1, 1.0)],
        *[("top_k", value) for value in (0, 10**9)],
        *[("seed", value) for value in (None, 0, 2**64 - 1)],
        *[("max_tokens", value) for value in (None, 0, 10**9)],
    ],
)
def test_ends_of_the_ranges_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_the_range_is_in_the_message() -> None:
    with pytest.raises(RequestError, match="at least 0 and at most 1"):
        SamplingParams(top_p=2)
    with pytest.raises(RequestError, match="more than 0 and finite"):
        SamplingParams(repetition_penalty=math.inf)
    with pytest.raises(RequestError, match=f"at least 0 and at most {2**64 - 1}"):
        SamplingParams(seed=2**64)


@pytest.mark.parametrize("value", [{-1: 1.0}, {"a": 1.0}, {1: 101}, {1: math.nan}, [1], {True: 0}])
def test_biases_are_checked(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^logit_bias"):
        SamplingParams(logit_bias=value)


@pytest.mark.parametrize(
    ("field", "value"), [("n", 0), ("n", None), ("top_logprobs", -1), ("top_logprobs", 21)]
)
def test_requests_are_checked(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field} is {value}: it must"):
        GenerateRequest(prompt=(1,), **{field: value})
