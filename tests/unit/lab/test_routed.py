from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.kernels.api import Ints
from colibri.lab.rig import Rig
from colibri.lab.routed import Script, foreseen, token_ids
from colibri.lab.synthetic import Routing, make_trace
from colibri.models.family import Family
from colibri.settings import Settings
from tests.tiny import each_sparse, write_tiny


def ids_of(**sizes: float) -> Ints:
    made = {"num_tokens": 300, "num_layers": 4, "num_experts": 32, "active": 4, **sizes}
    return token_ids(make_trace(Routing(**made)))  # type: ignore[arg-type]


@pytest.mark.parametrize("recall", [0.0, 0.60, 0.72, 0.90, 1.0])
def test_predictions_have_the_recall_stated(recall: float) -> None:
    ids = ids_of()
    found = foreseen(ids, 32, recall)
    hits = (ids[..., None] == found[..., None, :]).any(axis=-1)
    # 4,800 draws: four standard errors
    assert hits.mean() == pytest.approx(recall, abs=4 * (0.25 / ids.size) ** 0.5)
    ranks = hits.mean(axis=(0, 1))
    assert ranks[0] >= ranks[-1]
    if 0.5 < recall < 1:
        assert 1 - ranks[0] == pytest.approx((1 - recall) / 2, abs=0.06)
    assert all(len(set(row)) == 4 for row in found.reshape(-1, 4).tolist())


def test_wrong_predictions_are_popular_experts() -> None:
    ids = ids_of(zipf=1.5, num_domains=1)
    found = foreseen(ids, 32, 0.0)
    counts = np.bincount(ids[:, 0].ravel(), minlength=32)
    popular = np.argsort(-counts)[:16]
    assert np.isin(found[:, 0], popular).mean() > 0.7


@pytest.mark.parametrize("stickiness", [0.0, 0.5, 0.9])
def test_tokens_keep_the_share_of_experts_stated(stickiness: float) -> None:
    ids = ids_of(zipf=0.0, stickiness=stickiness)
    kept = (ids[1:, :, :, None] == ids[:-1, :, None, :]).any(axis=-1).mean()
    by_chance = 4 / 32
    assert kept == pytest.approx(stickiness + (1 - stickiness) * by_chance, abs=0.04)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_a_script_hands_out_its_tokens_in_a_circle(counts: list[int]) -> None:
    ids = np.arange(10 * 2 * 2, dtype=np.int32).reshape(10, 2, 2)
    script, at = Script(ids, 40, recall=1.0), 0
    for count in counts:
        wanted = ids[np.arange(at, at + count) % 10]
        np.testing.assert_array_equal(script.coming(count), wanted)
        np.testing.assert_array_equal(script.choose(0, count), wanted[:, 0])
        assert set(script.foresee(1, count).tolist()) == set(wanted[:, 1].ravel().tolist())
        np.testing.assert_array_equal(script.choose(1, count), wanted[:, 1])
        at += count
    script.seek(3)
    np.testing.assert_array_equal(script.choose(0, 1), ids[3:4, 0])


@each_sparse
def test_every_family_follows_a_script(family: Family, tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "tiny", family)
    options = {"threads": 1, "prefetch": "on"}
    with Rig.open(Settings(model=str(checkpoint)), Script(*_plain()), **options) as probe:
        experts = probe.prepared.description.experts
        limits = probe.prepared.description.blueprint.limits(1)
    sizes = (len(experts.layers), experts.layers[0].num_experts, limits.num_experts_per_tok)
    made = Routing(num_tokens=40, num_layers=sizes[0], num_experts=sizes[1], active=sizes[2])
    trace = make_trace(made)
    seen: list[Ints] = []
    with Rig.open(
        Settings(model=str(checkpoint)), Script.of(trace, 1.0), expert_slots=0.5, **options
    ) as rig:
        prompt = rig.random_ids(7)
        rig.llm.logits(prompt, routes=lambda layer, routing: seen.append(routing.ids))
        np.testing.assert_array_equal(np.stack(seen, axis=1), rig.script.ids[:7])
        stretch = rig.decode(6)
        assert stretch.tokens == 6
        assert stretch.counts.requests == 6 * sizes[0] * sizes[2]
        assert 0 <= stretch.hit_rate <= 1
        if stretch.counts.wanted:
            assert stretch.counts.foreseen == stretch.counts.wanted  # recall 1


def _plain() -> tuple[Ints, int]:
    return np.zeros((1, 1, 1), np.int32), 1
