"""Forecasts in closed form: more of anything is never slower, and sums are those of the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.errors import SettingsError
from colibri.lab.forecast import probes as probes_module
from colibri.lab.forecast.forecast import _DRIVE_SHARE, Forecast, forecast
from colibri.lab.forecast.hits import TYPICAL, expected_hits
from colibri.lab.forecast.outlook import Outlook, WhatIf, look_out
from colibri.lab.forecast.probes import Probes, Speed, probe
from colibri.lab.forecast.work import SparseLayer, Work, work_of
from colibri.llm.loading import Prepared, prepare
from colibri.models.family import Family
from colibri.settings import Settings
from tests.tiny import PLAIN, each_family, write_tiny

WORK = Work(
    num_layers=4,
    dense_bytes={"int8-g64": 4_000_000, "f32": 10_000},
    dense_weights={"int8-g64": 4_000_000, "f32": 2_500},
    shared_bytes=1_000_000,
    sparse=(SparseLayer(64, 8, 3_000_000, 6_000_000, "int4-g64"),) * 3,
    kv_bytes_per_position=4096.0,
    table_bytes=0,
    chunk=512,
)
PROBES = Probes(
    dram_bytes_per_s=20e9,
    disk_bytes_per_s=2e9,
    speeds={"int4-g64": Speed(15e9, 100e9), "int8-g64": Speed(17e9, 80e9)},
    threads=2,
)


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody sees."""


def expect(
    hit_rate: float = 0.6, resident: float = 0.25, work: Work = WORK, probes: Probes = PROBES
) -> Forecast:
    return forecast(work, probes, hit_rate, resident, 512)


def test_a_token_that_waits_for_the_drive() -> None:
    found = expect(hit_rate=0.0)
    assert found.bound == "disk"
    assert found.bytes_per_token["disk"] == WORK.routed_bytes == 3 * 8 * 3_000_000
    assert found.decode.value < 2e9 / WORK.routed_bytes  # never above what the drive gives
    assert found.decode.low == pytest.approx(0.85 * found.decode.value)
    assert found.ttft.low < found.ttft.value == pytest.approx(512 / found.prefill.value)


def test_a_token_that_waits_for_memory() -> None:
    found = expect(hit_rate=1.0, resident=1.0)
    assert found.bound == "memory"
    assert found.bytes_per_token == {
        "disk": 0,
        "experts": WORK.routed_bytes,
        "dense": 4_010_000,
        "kv": 512 * 4096,
    }


shares = st.floats(0, 1)


@given(shares, shares, shares)
def test_more_hits_are_never_slower(a: float, b: float, resident: float) -> None:
    low, high = sorted((a, b))
    assert expect(high, resident).decode.value >= expect(low, resident).decode.value * (1 - 1e-9)


@given(shares, st.floats(1, 50), st.sampled_from(["disk", "memory", "cores"]))
def test_a_better_machine_is_never_slower(hit_rate: float, by: float, what: str) -> None:
    better = {
        "disk": PROBES.scaled(cores=None, memory=None, disk=by * 2e9),
        "memory": PROBES.scaled(cores=None, memory=by * 20e9, disk=None),
        "cores": PROBES.scaled(cores=2 * round(by), memory=None, disk=None),
    }[what]
    before, after = expect(hit_rate), expect(hit_rate, probes=better)
    assert after.decode.value >= before.decode.value * (1 - 1e-9)
    assert after.prefill.value >= before.prefill.value * (1 - 1e-9)


def test_a_prompt_reads_each_expert_once() -> None:
    slow = replace(PROBES, disk_bytes_per_s=1e6)
    found = expect(0.0, 0.0, probes=slow)
    whole = sum(layer.num_experts * layer.record_bytes for layer in WORK.sparse)
    assert 512 / found.prefill.value == pytest.approx(whole / (_DRIVE_SHARE * 1e6), rel=0.01)


@each_family
def test_work_is_what_the_model_holds(family: Family, tmp_path: Path) -> None:
    prepared = prepare(Settings.resolve({}, model=str(write_tiny(tmp_path, family))))
    work, description = work_of(prepared.description, prepared.plan), prepared.description
    tied = description.blueprint.trunk.tied
    left = [t for t in description.dense if "embed_tokens" in t.parameter.name and not tied]
    unread = sum(tensor.resident_nbytes for tensor in left)
    assert (
        sum(work.dense_bytes.values())
        == sum(tensor.resident_nbytes for tensor in description.dense) - unread
    )
    assert work.routed_bytes + work.table_bytes == prepared.plan.bytes_per_token_cold
    assert 0 <= work.shared_bytes <= sum(work.dense_bytes.values())


def test_hits() -> None:
    assert expected_hits(1.0, None) == (1.0, "all")
    assert expected_hits(0.25, None) == (0.598, "typical")
    assert expected_hits(0.25, None, 0.9) == (0.9, "given")
    heat = np.zeros((2, 8))
    heat[0, :4] = 1000.0
    assert expected_hits(0.25, heat) == (1.0, "heat")
    assert expected_hits(0.25, heat / 1000).source == "typical"  # too little to tell
    rates = [expected_hits(share, None).rate for share in np.linspace(0, 1, 50)]
    assert rates == sorted(rates)
    assert TYPICAL[0] == (0, 0)
    assert TYPICAL[-1] == (1, 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ram=64GiB", WhatIf(ram=64 << 30)),
        ("disk=7GB/s, cores=16", WhatIf(disk=7e9, cores=16)),
        ("memory=80GB/s", WhatIf(memory=80e9)),
    ],
)
def test_other_machines(text: str, found: WhatIf) -> None:
    assert WhatIf.parse(text) == found


@pytest.mark.parametrize("text", ["", "gpu=1", "ram=lots", "cores=1.5", "cores=0", "ram"])
def test_machines_that_are_none(text: str) -> None:
    with pytest.raises(SettingsError, match="what_if"):
        WhatIf.parse(text)


def look(prepared: Prepared, **others: Any) -> Outlook:
    return look_out(prepared.description, prepared.plan, prepared.settings, silent, **others)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.setattr(probes_module, "_WORKING_SET", 8 << 20)
    monkeypatch.setattr(probes_module, "_TURN_S", 0.002)
    monkeypatch.setattr(probes_module, "_MOST_OTHERS", 2.0)  # whatever else runs here
    model = write_tiny(tmp_path / "model", PLAIN)
    return prepare(Settings.resolve({}, model=str(model), cache_dir=str(tmp_path / "cache")))


def test_probes_are_kept_and_measured_again(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, settings = prepared.description.experts, prepared.settings
    first = probe(index, ["f32"], settings, silent)
    assert first.dram_bytes_per_s > 1e8
    assert first.speed("f32").bytes_per_s > 1e7
    assert probe(index, ["f32"], settings, silent) == first
    more = probe(index, ["f32", "int4-g64"], settings, silent)
    assert more.speeds["f32"] == first.speeds["f32"]
    assert more.speeds.keys() == {"f32", "int4-g64"}
    assert probe(index, ["f32"], settings, silent, most_age_s=0).at > first.at
    (settings.cache / probes_module.NAME).write_text("{")
    assert probe(index, ["f32"], settings, silent).at > first.at


def test_disturbed_probes_are_not_kept(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_module, "_MOST_OTHERS", -1.0)
    found = probe(prepared.description.experts, ["f32"], prepared.settings, silent)
    assert found.is_disturbed
    assert not (prepared.settings.cache / probes_module.NAME).exists()


def test_an_outlook_has_a_plan_speeds_and_reasons(prepared: Prepared) -> None:
    found = look(prepared)
    told = found.as_dict()
    placement = told["placement"]
    assert placement["dense_bytes"] + placement["shared_bytes"] == prepared.plan.dense_bytes
    assert told["ram_budget_bytes"] == prepared.plan.budget_bytes
    for name in ("decode_tokens_per_s", "prefill_tokens_per_s", "ttft_s"):
        assert 0 < told[name]["low"] < told[name]["value"] < told[name]["high"]
    assert all(change.times_as_fast >= 1.05 for change in found.changes)


def test_an_outlook_on_another_machine(tmp_path: Path, prepared: Prepared) -> None:
    settings = replace(prepared.settings, expert_slots=0.5)
    half = prepare(settings)
    here = look(half)
    there = look(half, what_if=WhatIf(disk=1e6), hit_rate=0.2)
    assert there.hits == (0.2, "given")
    assert there.expected.bound == "disk"
    assert there.expected.decode.value < here.expected.decode.value
    assert there.changes[0].times_as_fast > 1.2
    larger = look(half, what_if=WhatIf(ram=1 << 40))
    assert larger.plan.budget_bytes == 1 << 40
