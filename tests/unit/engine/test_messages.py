"""Messages survive the wire, and nothing else comes through."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri import errors
from colibri.engine.messages import (
    LENGTH,
    Accepted,
    Cancel,
    Done,
    Failed,
    Finished,
    Logprobs,
    Submit,
    Tokens,
    failed,
    frame,
    raised,
    to_client,
    to_engine,
)
from colibri.engine.metrics import ExpertCounts, Metrics
from colibri.engine.request import FinishReason, GenerateRequest, SamplingParams
from colibri.errors import BusyError, ColibriError, RequestError
from tests.examples import examples

PARAMS = SamplingParams(temperature=0.5, seed=2**64 - 1, stop_ids=(1, 2), logit_bias={7: -2.5})
REQUEST = GenerateRequest(
    prompt=(1, 2, 3), params=PARAMS, n=2, top_logprobs=0, constraint={"regex": "a|b"}, marks=(2,)
)


@pytest.mark.parametrize(
    "message", [Submit(id=1, request=REQUEST), Cancel(id=2, choice=1, reason=FinishReason.STOP)]
)
def test_a_client_is_understood(message: Submit | Cancel) -> None:
    data = frame(message)
    assert LENGTH.unpack(data[:4])[0] == len(data) - 4
    assert to_engine(data[4:]) == message


@pytest.mark.parametrize(
    "message",
    [
        Accepted(id=3, params=PARAMS),
        Tokens(id=3, choice=0, token_ids=(5,), logprobs=(Logprobs(-0.25, ((5, -0.25),)),)),
        Finished(id=3, choice=0, reason=FinishReason.LENGTH),
        Done(id=3, metrics=Metrics(num_requests=1, experts=ExpertCounts(requests=8))),
    ],
    ids=lambda message: type(message).__name__,
)
def test_an_engine_is_understood(message: Tokens) -> None:
    assert to_client(frame(message)[4:]) == message


@given(st.binary(max_size=64))
@settings(max_examples=examples(50))
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        to_engine(body)


def test_values_are_checked_on_arrival() -> None:
    body = frame(Submit(id=1, request=REQUEST))[4:]
    with pytest.raises(RequestError, match="n is 0"):
        to_engine(body.replace(b"\xa1n\x02", b"\xa1n\x00"))


ERRORS = [
    found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, ColibriError)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_keep_their_type(kind: type[ColibriError]) -> None:
    message = to_client(frame(failed(kind("why"), 5))[4:])
    assert isinstance(message, Failed)
    assert message.id == 5
    error = raised(message)
    assert type(error) is kind
    assert str(error) == "why"


def test_a_busy_engine_says_when_to_ask_again() -> None:
    error = raised(failed(BusyError("full", 7.5), 1))
    assert isinstance(error, BusyError)
    assert error.retry_after_s == 7.5


def test_errors_that_are_not_ours_are_named() -> None:
    assert str(raised(failed(OSError("disk"), None))) == "OSError: disk"
    assert str(raised(Failed(id=1, error="SystemExit", message="no"))) == "SystemExit: no"


def test_numbers_that_are_too_large_are_refused() -> None:
    request = GenerateRequest(prompt=(2**70,))
    with pytest.raises(RequestError, match="too large"):
        frame(Submit(id=1, request=request))
