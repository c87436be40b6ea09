"""Rates are those of the last ten seconds."""

import pytest

from colibri.checkpoint.hub.meter import Meter


def test_the_meter_counts_what_came_lately() -> None:
    now = [0.0]
    meter = Meter(100, 1000, lambda: now[0])
    for second in range(1, 31):
        now[0] = float(second)
        meter.add(10)
    found = meter.progress()
    assert (found.done_bytes, found.silent_s) == (400, 0.0)
    assert found.bytes_per_s == pytest.approx(10, abs=1)
    assert found.left_s == pytest.approx(600 / found.bytes_per_s)
    now[0] = 60.0
    assert (meter.progress().bytes_per_s, meter.progress().left_s) == (0, None)
    assert meter.progress().silent_s == 30


def test_what_was_here_already_did_not_come() -> None:
    now = [0.0]
    meter = Meter(0, 100, lambda: now[0])
    now[0] = 1.0
    meter.correct(50)
    meter.add(10)
    meter.correct(-5)
    found = meter.progress()
    assert (found.done_bytes, found.bytes_per_s, meter.came) == (55, 10, 10)
