"""Linear attention: what it needs of a checkpoint, what it keeps, and that spellings agree."""

from typing import Any, cast

import numpy as np
import pytest

from colibri.formats import BF16, F32, Floats
from colibri.kernels.api import Batch, CellLayer, Limits, Matrix
from colibri.kernels.library import unavailable_reason
from colibri.kernels.native import NativeKernels
from colibri.kernels.reference import ReferenceKernels
from colibri.kv import KVPool
from colibri.memory.expert_store import ExpertStore
from colibri.nn.cell import shares, shares_nbytes
from colibri.nn.delta import BoundDelta, DeltaMixer, GatedDeltaNet, KimiDeltaAttention
from colibri.nn.norm import RMSNorm
from colibri.nn.sublayer import Site, Step
from tests.unit.nn.weights import NumberedWeights

P = "model.layers.7."
SIZES: dict[str, Any] = {"hidden_size": 24, "num_key_heads": 2, "num_heads": 4, "key_dim": 8}
SIZES |= {"value_dim": 6, "kernel": 4, "norm": RMSNorm(1e-6)}
GDN, NEXT = GatedDeltaNet(**SIZES), GatedDeltaNet(**SIZES, interleaved=True)
KDA = KimiDeltaAttention(**SIZES | {"num_key_heads": 4}, a_log_shape=(1, 1, 4, 1))
FULL = KimiDeltaAttention(
    **SIZES | {"num_key_heads": 4},
    a_log_shape=(6,),
    full_rank=frozenset({"f", "g"}),
    lower_bound=-5.0,
)
MIXERS = {"separate": GDN, "interleaved": NEXT, "low rank": KDA, "full rank": FULL}
KERNELS = ["reference"] if unavailable_reason() else ["reference", "native"]


class DrawnWeights(NumberedWeights):
    """Numbers instead of one number; `given` replaces some tensors."""

    def __init__(self, mixer: DeltaMixer, given: dict[str, Floats] | None = None) -> None:
        super().__init__(mixer.parameters(P))
        rng = np.random.default_rng(1)
        self.tensors = {
            name: rng.standard_normal(shape).astype(np.float32) / np.float32(2)
            for name, shape in self._shapes.items()
        }
        self.tensors |= given or {}

    def vector(self, name: str) -> Floats:
        return self.tensors[name].reshape(-1)

    def matrix(self, name: str, bias: str | None = None) -> Matrix:
        rows, columns = self._shapes[name]
        return Matrix(F32, rows, columns, F32.encode(self.tensors[name]))


def bound(mixer: DeltaMixer, weights: NumberedWeights, cells: int = 1) -> BoundDelta:
    """Layer 7 of a checkpoint that holds `weights`, with cells of zeros."""
    pool = KVPool([mixer.state], 1, BF16, cells)
    for cell in range(cells):
        pool.clear_cell(cell)
    return mixer.bind(Site(7, P, weights, pool.layer(0), None))


def run(name: str, layer: BoundDelta, x: Floats, batch: Batch) -> Floats:
    """What one step adds to zero."""
    kernels = ReferenceKernels() if name == "reference" else NativeKernels(threads=2)
    kernels.reserve(Limits(64, 24, 64, 24, 1, 1, 24))
    y = np.zeros_like(x)
    layer.step(Step(kernels, cast(ExpertStore, None), batch, np.zeros(len(x), np.int32)), x, y)
    return y


def rows(members: list[int], cells: list[int]) -> Batch:
    """A batch of these sequences."""
    order = np.array(members, np.int32)
    tables = np.full((len(cells), 1), -1, np.int32)
    return Batch(np.zeros_like(order), order, tables, np.array(cells, np.int32))


PLAIN = {"input_layernorm.weight": (24,)}
LINEAR = {
    "linear_attn.conv1d.weight": (56, 1, 4),
    "linear_attn.A_log": (4,),
    "linear_attn.dt_bias": (4,),
    "linear_attn.norm.weight": (6,),
    "linear_attn.out_proj.weight": (24, 24),
}
KIMI = {
    "self_attn.q_proj.weight": (32, 24),
    "self_attn.k_proj.weight": (32, 24),
    "self_attn.v_proj.weight": (24, 24),
    "self_attn.b_proj.weight": (4, 24),
    "self_attn.q_conv1d.weight": (32, 1, 4),
    "self_attn.k_conv1d.weight": (32, 1, 4),
    "self_attn.v_conv1d.weight": (24, 1, 4),
    "self_attn.dt_bias": (32,),
    "self_attn.o_norm.weight": (6,),
    "self_attn.o_proj.weight": (24, 24),
}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        (
            "separate",
            LINEAR
            | {
                "linear_attn.in_proj_qkv.weight": (56, 24),
                "linear_attn.in_proj_z.weight": (24, 24),
                "linear_attn.in_proj_b.weight": (4, 24),
                "linear_attn.in_proj_a.weight": (4, 24),
            },
        ),
        (
            "interleaved",
            LINEAR
            | {
                "linear_attn.in_proj_qkvz.weight": (80, 24),
                "linear_attn.in_proj_ba.weight": (8, 24),
            },
        ),
        (
            "low rank",
            KIMI
            | {
                "self_attn.A_log": (1, 1, 4, 1),
                "self_attn.f_a_proj.weight": (8, 24),
                "self_attn.f_b_proj.weight": (32, 8),
                "self_attn.g_a_proj.weight": (6, 24),
                "self_attn.g_b_proj.weight": (24, 6),
            },
        ),
        (
            "full rank",
            KIMI
            | {
                "self_attn.A_log": (6,),
                "self_attn.f_proj.weight": (32, 24),
                "self_attn.g_proj.weight": (24, 24),
            },
        ),
    ],
)
def test_parameters(name: str, more: dict[str, tuple[int, ...]]) -> None:
    parameters = MIXERS[name].parameters(P)
    found = {p.name.removeprefix(P): p.shape for p in parameters}
    assert len(found) == len(parameters)
    assert found == PLAIN | more


@pytest.mark.parametrize("name", MIXERS)
def test_binding_uses_all_of_it(name: str) -> None:
    mixer = MIXERS[name]
    weights = NumberedWeights(mixer.parameters(P))
    layer = bound(mixer, weights)
    assert weights.asked == weights.numbers.keys()
    convs = [conv.weight.shape for conv in layer.convs]
    assert convs == [(channels, 4) for channels in mixer.convolved]
    assert layer.out_norm.gate == ("silu" if "linear_attn" in str(weights.asked) else "sigmoid")
    assert layer.gate.lower_bound == (-5.0 if name == "full rank" else None)


@pytest.mark.parametrize("name", MIXERS)
def test_state_is_the_formula(name: str) -> None:
    """Three inputs of every channel and a matrix a head, float32, each share padded to 64 bytes."""
    mixer = MIXERS[name]
    sizes = [4 * 3 * channels for channels in mixer.convolved] + [4 * 4 * 8 * 6]
    assert mixer.state.planes == ()
    assert mixer.state.cell_nbytes == sum(-(-size // 64) * 64 for size in sizes)


def test_shares_follow_one_another() -> None:
    pool = np.zeros(1024, np.uint8)
    cell = CellLayer(pool, 512, 128, shares_nbytes([60, 4, 65]))
    found = shares(cell, [60, 4, 65])
    assert [(share.offset, share.nbytes) for share in found] == [(128, 60), (192, 4), (256, 65)]
    with pytest.raises(ValueError, match="do not make up"):
        shares(cell, [60, 4])
    with pytest.raises(ValueError, match="do not make up"):
        shares(None, [60])


@pytest.mark.parametrize("kernels", KERNELS)
def test_interleaved_is_another_order_of_rows(kernels: str) -> None:
    """The same numbers stored key head by key head."""
    separate = DrawnWeights(GDN)
    attn = f"{P}linear_attn."
    qkv, z, b, a = (separate.tensors[f"{attn}in_proj_{n}.weight"] for n in ("qkv", "z", "b", "a"))
    q, k, v = np.split(qkv, [16, 32])
    heads = [part.reshape(2, -1, 24) for part in (q, k, v, z)]
    given = dict(separate.tensors)
    given[f"{attn}in_proj_qkvz.weight"] = np.concatenate(heads, axis=1).reshape(80, 24)
    small = [part.reshape(2, 2, 24) for part in (b, a)]
    given[f"{attn}in_proj_ba.weight"] = np.concatenate(small, axis=1).reshape(8, 24)
    x, batch = np.random.default_rng(2).standard_normal((9, 24), np.float32), rows([0] * 9, [0])
    wanted = run(kernels, bound(GDN, separate), x, batch)
    found = run(kernels, bound(NEXT, DrawnWeights(NEXT, given)), x, batch)
    if kernels == "native":
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(found, wanted, atol=2e-6)  # BLAS may sum rows by their place


@pytest.mark.parametrize("kernels", KERNELS)
def test_full_rank_is_the_product_of_both(kernels: str) -> None:
    """Decay and gate as one matrix each, `f_b f_a` and `g_b g_a`."""
    low, attn = DrawnWeights(KDA), f"{P}self_attn."
    full = KimiDeltaAttention(
        **SIZES | {"num_key_heads": 4}, a_log_shape=(4,), full_rank=frozenset({"f", "g"})
    )
    given = dict(low.tensors)
    for gate in "fg":
        first, second = (low.tensors[f"{attn}{gate}_{n}_proj.weight"] for n in "ab")
        given[f"{attn}{gate}_proj.weight"] = second @ first
    x, batch = np.random.default_rng(2).standard_normal((9, 24), np.float32), rows([0] * 9, [0])
    wanted = run(kernels, bound(KDA, low), x, batch)
    found = run(kernels, bound(full, DrawnWeights(full, given)), x, batch)
    np.testing.assert_allclose(found, wanted, atol=2e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_sequences_in_a_batch_are_alone(kernels: str, name: str) -> None:
    mixer, order = MIXERS[name], [0, 1, 1, 0, 1, 0, 0]
    x = np.random.default_rng(3).standard_normal((7, 24), np.float32)
    weights = DrawnWeights(mixer)
    mixed = run(kernels, bound(mixer, weights, 2), x, rows(order, [1, 0]))
    for member in (0, 1):
        here = np.flatnonzero(np.array(order) == member)
        alone = run(kernels, bound(mixer, weights), x[here], rows([0] * len(here), [0]))
        np.testing.assert_allclose(mixed[here], alone, atol=1e-5)
        if kernels == "native":
            np.testing.assert_array_equal(mixed[here], alone)


@pytest.mark.parametrize("name", MIXERS)
def test_demand_covers_the_products(name: str) -> None:
    mixer = MIXERS[name]
    (columns,) = (
        p.shape[1]
        for p in mixer.parameters(P)
        if p.name.endswith(("o_proj.weight", "out_proj.weight"))
    )
    assert mixer.demand.attention_width >= columns
    assert mixer.demand.run_width > 0
