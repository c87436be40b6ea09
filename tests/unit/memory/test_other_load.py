"""Who keeps the processors busy while something is measured."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from colibri.memory.other_load import OtherLoad

IDLE = "cpu  100 0 0 1000 0 0 0 0 0 0\n"
BUSY = "cpu  1100 0 0 2900 100 0 0 1000 0 0\n"  # of 40 s, 20 busy, 10 of them stolen


def test_the_share_of_others(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(IDLE)
    load = OtherLoad(tmp_path)
    stat.write_text(BUSY)
    share = load.share()
    assert share is not None
    assert 0.4 < share <= 0.5
    assert OtherLoad(tmp_path / "nowhere").share() is None


def test_children_are_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = multiprocessing.get_context("spawn").Process(target=sys.exit)
    monkeypatch.setattr(type(child), "pid", 77)
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [child])
    about = tmp_path / "77"
    about.mkdir()
    line = "77 (a ) b) S 1 2 3 4 5 6 7 8 9 10 {} {} 0 0"
    (tmp_path / "stat").write_text(IDLE)
    (about / "stat").write_text(line.format(0, 0))
    load = OtherLoad(tmp_path)
    (tmp_path / "stat").write_text(BUSY)
    ticks = os.sysconf("SC_CLK_TCK")
    (about / "stat").write_text(line.format(8 * ticks, 2 * ticks))
    share = load.share()
    assert share is not None
    assert 0.15 < share <= 0.25
