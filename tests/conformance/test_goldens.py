"""Every family against transformers, on both kernels, streamed and resident.

Compared are logits, greedy ids and router choices.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.errors import UnsupportedModelError
from colibri.kernels.api import Routing
from colibri.kernels.library import unavailable_reason
from colibri.models.family import Family
from colibri.models.registry import all_families
from tests.conformance.cases import (
    SHARED,
    Golden,
    is_known,
    is_sparse,
    least_slots,
    own_golden,
    shared_cases,
    shared_golden,
)
from tests.tiny import SPELLINGS, write_tiny

KERNELS = ["reference"] if unavailable_reason() else ["reference", "native"]
KNOWN = [case for case in shared_cases() if is_known(case)]
UNKNOWN = [case for case in shared_cases() if not is_known(case)]
ABSENT = pytest.param(SHARED, marks=pytest.mark.skip(reason=f"no such fixtures in {SHARED}"))
EXACT = {"activations": "float32", "kv": "f32"}


def compare(path: Path, golden: Golden, kernels: str, slots: int | str) -> None:
    """Logits within 2e-4 of the largest, the same greedy ids, the same experts."""
    routes: dict[int, list[np.ndarray]] = {}

    def keep(layer: int, routing: Routing) -> None:
        routes.setdefault(layer, []).append(routing.ids)

    with LLM.open(path, kernels=kernels, expert_slots=slots, **EXACT) as llm:
        logits = llm.logits(golden.ids, routes=keep)
        completion = llm.generate(
            golden.ids, max_tokens=len(golden.greedy_ids), temperature=0, ignore_eos=True
        )
    assert logits.shape == golden.logits.shape
    assert np.abs(logits - golden.logits).max() <= 2e-4 * np.abs(golden.logits).max()
    assert completion.token_ids == golden.greedy_ids
    assert routes.keys() == golden.routes.keys()
    for layer, chosen in golden.routes.items():
        found = np.concatenate(routes[layer])
        assert np.array_equal(np.sort(found, axis=1), np.sort(chosen, axis=1)), f"layer {layer}"


@pytest.mark.parametrize("slots", ["least", "100%"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", all_families(), ids=lambda f: f.model_type)
def test_own_golden(family: Family, kernels: str, slots: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, family)
    compare(path, own_golden(family), kernels, least_slots_or(path, slots))


@pytest.mark.parametrize(("spelling", "shards"), [*zip(SPELLINGS, (1, 5, 3), strict=True)])
@pytest.mark.parametrize("family", all_families(), ids=lambda f: f.model_type)
def test_spelling(family: Family, spelling: str, shards: int, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, family, spelling=spelling, shards=shards)
    compare(path, own_golden(family), KERNELS[-1], least_slots_or(path, "least"))


@pytest.mark.parametrize("slots", ["least", "100%"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", KNOWN or [ABSENT], ids=lambda p: f"{p.parent.name}-{p.name}")
def test_shared_fixture(case: Path, kernels: str, slots: str) -> None:
    compare(case, shared_golden(case), kernels, least_slots_or(case, slots))


@pytest.mark.parametrize("case", KNOWN or [ABSENT], ids=lambda p: f"{p.parent.name}-{p.name}")
def test_hub_style_config(case: Path, tmp_path: Path) -> None:
    for file in case.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    shutil.copyfile(case / "config.hub_style.json", tmp_path / "config.json")
    compare(tmp_path, shared_golden(case), KERNELS[-1], "100%")


@pytest.mark.parametrize("case", UNKNOWN or [ABSENT], ids=lambda p: f"{p.parent.name}-{p.name}")
def test_fixture_without_a_family_is_refused(case: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        LLM.open(case)
    assert str(refusal.value)


def least_slots_or(path: Path, slots: str) -> int | str:
    """`least` resolved to a number."""
    return least_slots(path) if slots == "least" and is_sparse(path) else "100%"
