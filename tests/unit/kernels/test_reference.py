"""Linear, dense, router, expert and head steps of the reference against float64."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.formats import BF16, F32, FORMATS, Format
from colibri.kernels.api import (
    EMPTY,
    FAILED,
    FFN,
    LOADING,
    READY,
    Activations,
    ExpertPart,
    Experts,
    Head,
    Limits,
    NonFiniteRow,
    Norm,
    Router,
    Routing,
    SlotFailed,
    Slots,
)
from colibri.kernels.reference import ReferenceKernels
from colibri.kernels.reference_math import sigmoid, silu, softmax
from tests.unit.kernels.operands import (
    HIDDEN,
    matrix,
    norm,
    normal,
    plain_linear,
    plain_norm,
    random_matrix,
    values,
)

KERNELS = ReferenceKernels()
WIDTH, NUM_EXPERTS, ACTIVE = 40, 6, 3
seeds = st.integers(0, 2**32 - 1)
each_format = pytest.mark.parametrize("fmt", list(FORMATS.values()), ids=repr)


def glu(gate: np.ndarray, up: np.ndarray, down: np.ndarray, x: np.ndarray) -> np.ndarray:
    """`down(silu(gate x) * (up x))` in float64."""
    a = x @ gate.T.astype(np.float64)
    return (a / (1 + np.exp(-a)) * (x @ up.T)) @ down.T


def ffn(rng: np.random.Generator, *, with_norm: bool) -> FFN:
    """A dense layer, or a shared expert."""
    up, down = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    parts = [random_matrix(rng, *shape, bias=False) for shape in (up, up, down)]
    return FFN(*parts, norm(rng, HIDDEN) if with_norm else None)


@pytest.mark.parametrize("name", ["name", "activations"])
def test_says_what_it_is(name: str) -> None:
    assert {"name": "reference", "activations": Activations.FLOAT32}[name] == getattr(KERNELS, name)


def test_workspace_grows_with_the_step() -> None:
    small = Limits(8, 64, 128, 96, 16, 4, 512)
    for field in ("rows", "hidden_size", "attention_width", "vocab_size"):
        larger = replace(small, **{field: 4 * getattr(small, field)})
        assert KERNELS.workspace_nbytes(larger) > KERNELS.workspace_nbytes(small) > 0
    KERNELS.reserve(small)


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=8))
def test_activations_never_overflow(inputs: list[float]) -> None:
    x = np.array([inputs], np.float32)
    wide = np.clip(x.astype(np.float64), -700, 700)
    assert np.allclose(sigmoid(x), 1 / (1 + np.exp(-wide)), rtol=1e-5, atol=1e-30)
    assert np.allclose(silu(x), x * (1 / (1 + np.exp(-wide))), rtol=1e-5, atol=1e-6)
    shares = softmax(x)
    assert np.isclose(shares.sum(), 1, atol=1e-5)
    assert shares[0, x.argmax()] == shares.max()  # close inputs may tie
    assert all(found.dtype == np.float32 for found in (sigmoid(x), silu(x), shares))


@each_format
@pytest.mark.parametrize("bias", [False, True])
def test_matmul_of_every_format(fmt: Format, bias: bool) -> None:
    rng = np.random.default_rng(0)
    found = matrix(normal(rng, 13, 70), fmt, normal(rng, 13) if bias else None)
    x = normal(rng, 3, 70)
    out = KERNELS.matmul(found, x)
    assert out.shape == (3, 13)
    assert out.dtype == np.float32
    assert np.allclose(out, plain_linear(found, x.astype(np.float64)), atol=1e-4)


@each_format
def test_embed(fmt: Format) -> None:
    table = matrix(normal(np.random.default_rng(0), 11, 64), fmt)
    ids = np.array([10, 0, 3, 3], np.int32)
    assert np.array_equal(KERNELS.embed(table, ids), values(table)[ids].astype(np.float32))


def test_head_step() -> None:
    rng = np.random.default_rng(0)
    head = Head(norm(rng, HIDDEN), random_matrix(rng, 50, HIDDEN, bias=False))
    x = normal(rng, 4, HIDDEN)
    before = x.copy()
    wanted = plain_linear(head.lm_head, plain_norm(x.astype(np.float64), head.norm))
    assert np.allclose(KERNELS.head_step(head, x), wanted, atol=1e-4)
    assert np.array_equal(x, before)


@pytest.mark.parametrize("with_norm", [True, False])
def test_ffn_step_adds_in_place(with_norm: bool) -> None:
    rng = np.random.default_rng(0)
    layer, x = ffn(rng, with_norm=with_norm), normal(rng, 4, HIDDEN)
    wide = x.astype(np.float64)
    hidden = wide if layer.norm is None else plain_norm(wide, layer.norm)
    parts = map(values, (layer.gate_proj, layer.up_proj, layer.down_proj))
    wanted = wide + glu(*parts, hidden)
    KERNELS.ffn_step(layer, x)
    assert np.allclose(x, wanted, atol=1e-4)


def router(rng: np.random.Generator, active: int = ACTIVE, normalize: bool = False) -> Router:
    """Gates of `NUM_EXPERTS`."""
    gate = random_matrix(rng, NUM_EXPERTS, HIDDEN, bias=False)
    return Router(norm(rng, HIDDEN), gate, active, normalize)


@pytest.mark.parametrize("normalize", [False, True])
@settings(max_examples=20)
@given(seed=seeds, active=st.integers(1, NUM_EXPERTS), rows=st.integers(1, 7))
def test_route_step(normalize: bool, seed: int, active: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    layer, x = router(rng, active, normalize), normal(rng, rows, HIDDEN)
    found = KERNELS.route_step(layer, x)
    hidden = plain_norm(x.astype(np.float64), layer.norm)
    shares = np.exp(plain_linear(layer.gate, hidden))
    shares /= shares.sum(axis=1, keepdims=True)
    assert np.allclose(found.hidden, hidden, atol=1e-5)
    assert found.ids.shape == found.weights.shape == (rows, active)
    assert found.ids.dtype == np.int32
    assert found.weights.dtype == np.float32
    assert (np.diff(found.weights, axis=1) <= 0).all()
    for row in range(rows):
        chosen = found.ids[row].tolist()
        assert len(set(chosen)) == active
        rest = [share for e, share in enumerate(shares[row]) if e not in chosen]
        assert min(shares[row][chosen]) >= max(rest, default=0) - 1e-6
        total = shares[row][chosen].sum() if normalize else 1
        assert np.allclose(found.weights[row], shares[row][chosen] / total, atol=1e-5)
    assert found.experts.tolist() == sorted(set(found.ids.reshape(-1).tolist()))


def test_ties_go_to_the_lowest_expert() -> None:
    gate = np.zeros((NUM_EXPERTS, HIDDEN), np.float32)
    gate[[4, 1, 3], 0] = 1.0
    layer = Router(Norm(np.ones(HIDDEN, np.float32), 1e-5), matrix(gate), 4, False)
    found = KERNELS.route_step(layer, np.ones((2, HIDDEN), np.float32))
    assert found.ids.tolist() == [[1, 3, 4, 0]] * 2
    assert found.experts.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_row_is_named(value: float) -> None:
    rng = np.random.default_rng(0)
    x = normal(rng, 4, HIDDEN)
    x[2, 5] = x[3, 0] = value
    with np.errstate(invalid="ignore"), pytest.raises(NonFiniteRow) as broken:
        KERNELS.route_step(router(rng), x)
    assert broken.value.row == 2


class Bench:
    """Experts in slots of an arena, in a random order, and what they amount to in float64."""

    def __init__(self, fmt: Format, *, interleaved: bool = False, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.rng, self.waited = rng, list[int]()
        shapes = [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
        self.weights = [[normal(rng, *s) / 5 for s in shapes] for _ in range(NUM_EXPERTS)]
        packed = [[fmt.pack(fmt.encode(w), w.shape) for w in expert] for expert in self.weights]
        self.numbers = [
            [fmt.decode(p, s) for p, s in zip(expert, shapes, strict=True)] for expert in packed
        ]
        panels = [fmt.panel_nbytes(columns) for _, columns in shapes]
        strides = [2 * p if interleaved and i < 2 else p for i, p in enumerate(panels)]
        names = ("gate_proj", "up_proj", "down_proj")
        parts = [
            ExpertPart(names[i], fmt, *shapes[i], strides[i])  # type: ignore[arg-type]
            for i in range(3)
        ]
        self.layer = Experts(NUM_EXPERTS, *parts)
        self.slot_of = rng.permutation(NUM_EXPERTS + 2)[:NUM_EXPERTS].astype(np.int32)
        self.table = self._table(packed, panels[0] if interleaved else None)

    def _table(self, packed: list[list[np.ndarray]], panel: int | None) -> Slots:
        """Slots with a page of other bytes before each part; gate and up alternate by `panel`."""
        size = sum(part.size for part in packed[0]) + 3 * 128
        arena = np.full((NUM_EXPERTS + 2) * size, 0xFF, np.uint8)
        parts = np.zeros((NUM_EXPERTS + 2, 3), np.int64)
        for slot, expert in zip(self.slot_of.tolist(), packed, strict=True):
            gate, up, down = expert
            start = slot * size + 64
            if panel is not None:
                both = np.stack([gate.reshape(-1, panel), up.reshape(-1, panel)], 1).reshape(-1)
                places = [(start, both), (start + panel, both[panel:]), (start + both.size, down)]
            else:
                second = start + gate.size + 128
                places = [(start, gate), (second, up), (second + up.size + 128, down)]
            for i, (at, data) in enumerate(places):
                arena[at : at + data.size] = data
                parts[slot, i] = at
        states = np.full(NUM_EXPERTS + 2, EMPTY, np.int32)
        states[self.slot_of] = LOADING
        return Slots(arena, parts, states, self._wait)

    def _wait(self, slot: int) -> None:
        self.waited.append(slot)
        if self.table.states[slot] == LOADING:
            self.table.states[slot] = READY

    def routing(self, rows: int) -> Routing:
        """Random choices with weights of any size."""
        ids = np.stack([self.rng.permutation(NUM_EXPERTS)[:ACTIVE] for _ in range(rows)])
        weights = self.rng.uniform(0, 1, ids.shape).astype(np.float32)
        chosen = ids.astype(np.int32)
        return Routing(normal(self.rng, rows, HIDDEN), chosen, weights, np.unique(chosen))

    def wanted(self, routing: Routing) -> np.ndarray:
        """`sum_e w_e GLU_e(h)`, token by token."""
        out = np.zeros(routing.hidden.shape)
        for row, hidden in enumerate(routing.hidden.astype(np.float64)):
            for expert, weight in zip(routing.ids[row], routing.weights[row], strict=True):
                out[row] += weight * glu(*self.numbers[expert], hidden)
        return out

    def step(self, routing: Routing, experts: np.ndarray, y: np.ndarray) -> None:
        """`moe_step` over some of the experts."""
        KERNELS.moe_step(self.layer, routing, experts, self.slot_of[experts], self.table, y)


@each_format
def test_moe_step_of_every_format(fmt: Format) -> None:
    bench = Bench(fmt)
    routing = bench.routing(5)
    y = np.zeros((5, HIDDEN), np.float32)
    bench.step(routing, routing.experts, y)
    assert np.allclose(y, bench.wanted(routing), atol=1e-4)
    assert bench.waited == bench.slot_of[routing.experts].tolist()


@pytest.mark.parametrize("name", ["int4-g64", "int8-g32", "bf16"])
def test_panels_of_gate_and_up_may_alternate(name: str) -> None:
    bench = Bench(FORMATS[name], interleaved=True)
    routing = bench.routing(4)
    y = np.zeros((4, HIDDEN), np.float32)
    bench.step(routing, routing.experts, y)
    assert np.allclose(y, bench.wanted(routing), atol=1e-4)


@settings(max_examples=15)
@given(seeds, st.integers(1, 6), st.sets(st.integers(1, NUM_EXPERTS - 1)))
def test_chunks_ascending_give_the_same_bits(seed: int, rows: int, cuts: set[int]) -> None:
    bench = Bench(F32, seed=seed)
    routing = bench.routing(rows)
    whole = np.zeros((rows, HIDDEN), np.float32)
    bench.step(routing, routing.experts, whole)
    y = np.zeros((rows, HIDDEN), np.float32)
    for chunk in np.split(routing.experts, sorted(cuts)):
        bench.step(routing, chunk, y)
    assert np.array_equal(y, whole)
    assert np.allclose(y, bench.wanted(routing), atol=1e-4)


def test_a_failed_slot_is_named() -> None:
    bench = Bench(BF16)
    routing = bench.routing(5)
    slot = int(bench.slot_of[routing.experts[1]])
    bench.table.states[slot] = FAILED
    with pytest.raises(SlotFailed) as failed:
        bench.step(routing, routing.experts, np.zeros((5, HIDDEN), np.float32))
    assert failed.value.slot == slot


@pytest.mark.parametrize("kind", ["none", "plain", "gated"])
def test_moe_finish(kind: str) -> None:
    bench = Bench(F32)
    rng, routing = bench.rng, bench.routing(4)
    shared = None if kind == "none" else ffn(rng, with_norm=False)
    gate = random_matrix(rng, 1, HIDDEN, bias=False) if kind == "gated" else None
    layer = replace(bench.layer, shared=shared, shared_gate=gate)
    x, y = normal(rng, 4, HIDDEN), normal(rng, 4, HIDDEN)
    wanted = x.astype(np.float64) + y
    if shared is not None:
        hidden = routing.hidden.astype(np.float64)
        parts = map(values, (shared.gate_proj, shared.up_proj, shared.down_proj))
        share = 1.0 if gate is None else 1 / (1 + np.exp(-plain_linear(gate, hidden)))
        wanted += share * glu(*parts, hidden)
    KERNELS.moe_finish(layer, routing, y, x)
    assert np.allclose(x, wanted, atol=1e-4)
