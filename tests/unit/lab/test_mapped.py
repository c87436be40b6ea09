import numpy as np
import pytest

from colibri.errors import ColibriError
from colibri.lab.mapped import MappedExperts
from colibri.lab.memory_cap import MemoryCap
from colibri.lab.rig import Rig
from colibri.lab.routed import Script
from colibri.lab.synthetic import Routing, make_trace
from colibri.lab.worker import Worker
from colibri.models.generate import generate, shape_config
from colibri.settings import Settings
from tests.tiny import PLAIN


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    directory = tmp_path_factory.mktemp("mapped") / "tiny"
    generate(directory, shape_config(PLAIN, "tiny"))
    return Settings(model=str(directory), threads=1)


def script(settings: Settings) -> Script:
    empty = Script(np.zeros((1, 1, 1), np.int32), 1)
    with Rig.open(settings, empty) as probe:
        experts = probe.prepared.description.experts
        limits = probe.prepared.description.blueprint.limits(1)
    layers, width = len(experts.layers), (limits.num_experts, limits.num_experts_per_tok)
    made = Routing(num_tokens=20, num_layers=layers, num_experts=width[0], active=width[1])
    return Script.of(make_trace(made))


def test_mapped_experts_give_the_same_bits(tiny: Settings) -> None:
    ids, found = [1, 2, 3, 4, 5, 6], []
    for mapped in (False, True):
        with Rig.open(tiny, script(tiny)) as rig:
            if mapped:
                experts = MappedExperts(rig.prepared.description.experts)
                experts.serve(rig.model)
                before = rig.llm.metrics().experts.requests
            found.append(rig.llm.logits(ids))
            if mapped:
                assert rig.llm.metrics().experts.requests == before
                assert experts.rate(rig.kernels, 1 << 16) > 0
    np.testing.assert_array_equal(*found)


def test_a_rig_in_another_process(tiny: Settings) -> None:
    chosen = script(tiny)
    with Worker(tiny, chosen.ids, 64, expert_slots=0.5) as worker:
        worker.ask("fill")
        assert worker.ask("decode", 2).tokens == 2
        assert worker.ask("peak_rss") > worker.ask("plan").slots_bytes
    with pytest.raises(ColibriError, match="too small"):
        Worker(tiny, chosen.ids, 64, ram=1 << 20)


def test_a_memory_cap_is_taken_away_again() -> None:
    try:
        cap = MemoryCap(1 << 30)
    except OSError as error:
        pytest.skip(f"memory cgroups cannot be written here: {error}")
    with cap:
        assert cap.path.is_dir()
    assert not cap.path.exists()
