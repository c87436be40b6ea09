"""Any sublayer stands between streams; nothing else knows of them."""

from dataclasses import dataclass

import numpy as np
import pytest

from colibri.checkpoint.experts import ExpertLayer
from colibri.formats import Floats
from colibri.kernels.api import Batch, Ints, Kernels
from colibri.kernels.reference import ReferenceKernels
from colibri.kv import LayerState, StateShape
from colibri.nn.hyper import HyperConnected, HyperTrunk, Streams, hyper_connected
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter
from colibri.nn.sublayer import BoundSublayer, Demand, Layer, Site, Step, Sublayer
from tests.unit.nn.weights import NumberedWeights

D, N = 6, 3
STREAMS = Streams(count=N, hidden_size=D, iterations=4, eps=1e-6, norm_eps=1e-5)
KERNELS = ReferenceKernels()


@dataclass(frozen=True, slots=True)
class Doubling(Sublayer):
    """Adds twice what it reads."""

    state = StateShape(cell_nbytes=8)
    demand = Demand(num_experts=5, num_experts_per_tok=2, array_width=11)

    def parameters(self, prefix: str) -> list[Parameter]:
        return [Parameter(f"{prefix}own", (1,), "bias")]

    def expert_layer(self, layer: int, prefix: str) -> ExpertLayer | None:
        return ExpertLayer(layer, f"{prefix}mlp.experts", 5, D, 4)

    def bind(self, site: Site) -> BoundSublayer:
        return BoundDoubling()


class BoundDoubling(BoundSublayer):
    """Says that it wants what it reads, rounded down."""

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        y += 2 * x

    def foresee(self, kernels: Kernels, x: Floats, ids: Ints) -> Ints:
        return np.floor(x.ravel()).astype(np.int32)


def bound() -> tuple[BoundSublayer, NumberedWeights]:
    wrapped = HyperConnected(inner=Doubling(), streams=STREAMS, name="attn_hc")
    weights = NumberedWeights(wrapped.parameters("a."))
    return wrapped.bind(Site(0, "a.", weights, LayerState((), None), None)), weights


def step_of(rows: int) -> Step:
    ids = np.zeros(rows, np.int32)
    return Step(KERNELS, None, Batch(ids, ids, np.zeros((1, 1), np.int32)), ids)  # type: ignore[arg-type]


def test_a_declaration_passes_on_what_is_inside() -> None:
    wrapped = hyper_connected(Layer(Doubling(), Doubling()), STREAMS)
    first, second = wrapped.sublayers
    assert first.state == Doubling.state
    assert first.demand.num_experts == 5
    assert first.demand.array_width > Doubling.demand.array_width + N * D
    assert first.expert_layer(3, "p.") == Doubling().expert_layer(3, "p.")
    shapes = {p.name: p.shape for p in first.parameters("p.")}
    assert shapes == {
        "p.own": (1,),
        "p.attn_hc.fn": (15, 18),
        "p.attn_hc.base": (15,),
        "p.attn_hc.scale": (3,),
    }
    assert "p.ffn_hc.fn" in {p.name for p in second.parameters("p.")}


def test_a_sublayer_reads_one_sum_and_adds_to_every_stream() -> None:
    sublayer, _ = bound()
    x = np.random.RandomState(1).standard_normal((4, N * D)).astype(np.float32)
    before, step = x.copy(), step_of(4)
    read = sublayer.reading(KERNELS, x)
    sublayer.step(step, x, x)
    # All weights of the mix are alike, so M is even and all streams become one.
    streams = before.reshape(4, N, D)
    post = 2 / (1 + np.exp(-100.0))
    wanted = post * 2 * read + streams.mean(axis=1)
    np.testing.assert_allclose(x.reshape(4, N, D), wanted[:, None].repeat(N, 1), rtol=1e-4)
    assert sublayer.innermost() is not sublayer
    assert isinstance(sublayer.innermost(), BoundDoubling)


def test_it_foresees_by_what_it_would_read() -> None:
    sublayer, _ = bound()
    x = np.full((1, N * D), 1.25, np.float32)
    read = sublayer.reading(KERNELS, x)
    found = sublayer.foresee(KERNELS, x, np.zeros(1, np.int32))
    np.testing.assert_array_equal(found, np.floor(read.ravel()))


def test_streams_are_mixed_in_place_alone() -> None:
    sublayer, _ = bound()
    x = np.ones((1, N * D), np.float32)
    with pytest.raises(ValueError, match="mixed in place"):
        sublayer.step(step_of(1), x, x.copy())


@pytest.mark.parametrize("head", ["mean", "weighed"])
def test_a_trunk_copies_embeddings_and_ends_in_one_row(head: str) -> None:
    trunk = HyperTrunk(
        vocab_size=9,
        hidden_size=D,
        norm=RMSNorm(1e-6),
        tied=False,
        streams=STREAMS,
        head=head,  # type: ignore[arg-type]
    )
    parameters = [*trunk.first_parameters(), *trunk.last_parameters()]
    mixes = [p.name for p in parameters if "hc_head" in p.name]
    assert len(mixes) == (3 if head == "weighed" else 0)
    ready = trunk.bind(NumberedWeights(parameters))
    x = ready.embed(step_of(2))
    assert x.shape == (2, N * D)
    assert (x == x[0, 0]).all()
    assert ready.logits(KERNELS, x).shape == (2, 9)
    assert ready.logits(KERNELS, x[:0]).shape == (0, 9)
