"""What the engine's trace says about its steps."""

from typing import Any

import numpy as np

from colibri.lab.serve_pace import Steps, _usual, steps_of

BEGAN = 100.0


def span(name: str, kind: str, at: float, lasts: float, **told: Any) -> dict[str, Any]:
    times = {"ts": (at - BEGAN) * 1e6, "dur": lasts * 1e6}
    return {"ph": "X", "name": name, "cat": kind, "args": told, **times}


def test_steps_lie_between_the_beginnings_of_passes() -> None:
    trace = [
        {"ph": "M", "name": "began", "args": {"monotonic_ns": round(BEGAN * 1e9)}},
        span("forward", "python", 200.0, 0.5, rows=16),  # a prompt
        *(span("forward", "python", 201.0 + n, 0.8, rows=1) for n in range(4)),
        span("matmul", "kernel", 201.1, 0.2),
        span("moe_step", "kernel", 201.4, 0.3),
        span("moe_step", "kernel", 202.4, 0.1),
        span("wait", "wait", 202.4, 0.1),  # lies within the one before
        span("moe_step", "kernel", 204.2, 0.1),  # behind the last beginning
    ]
    steps = steps_of(trace, 200.5, 300.0)
    assert steps.taken.tolist() == [1.0, 1.0, 1.0]
    assert np.allclose(steps.native, [0.5, 0.1, 0.0])
    assert len(steps_of(trace, 202.5, 300.0).taken) == 1
    assert len(steps_of(trace, 300.0, 301.0).taken) == 0


def test_pauses_of_native_code_are_not_the_pipes() -> None:
    usual = np.full(20, 0.1)
    native = Steps(np.append(usual, 0.9), np.append(usual, 0.85))
    outside = Steps(np.append(usual, 0.9), np.append(usual, 0.1))
    for busy, found in ((native, 0.0), (outside, 1.0)):
        ratio, pauses = _usual([Steps(usual, usual)], [busy])
        assert (ratio.value, ratio.holds) == (1.0, True)
        assert (pauses.value, pauses.holds) == (found, not found)
        assert pauses.details["long"] == 1
