"""The Mixture-of-Experts feed-forward: router, routed experts out of the store, shared expert."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from colibri.checkpoint.experts import ExpertLayer
from colibri.errors import NumericsError
from colibri.formats import Floats
from colibri.kernels.api import (
    FFN,
    PLAIN,
    Experts,
    Ints,
    Kernels,
    NonFiniteRow,
    Router,
    Routing,
    SlotFailed,
    Swiglu,
)
from colibri.nn.ffn import bind_glu, glu_parameters
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, Weights, bind_linear
from colibri.nn.route import Route
from colibri.nn.sublayer import NOTHING, BoundSublayer, Demand, Site, Step, Sublayer


class MoEFFNConfig(Protocol):
    """The config keys that routed experts read."""

    @property
    def hidden_size(self) -> int:
        """D."""

    @property
    def norm(self) -> RMSNorm:
        """Every norm of the model."""

    @property
    def num_experts(self) -> int:
        """E."""

    @property
    def num_experts_per_tok(self) -> int:
        """A."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEFFN(Sublayer):
    """`x += sum_e w_e GLU_e(h) + shared(h)`, `h = norm(x)`, w by `route` from the router's logits.

    Attributes:
        intermediate_size: width F of one expert.
        route: how experts are chosen and weighed.
        shared_intermediate_size: width of the shared expert, None without one.
        shared_gate: whether the shared expert is multiplied by the sigmoid of a gate of its own.
        swiglu: the activation of routed and shared experts.
        transposed, interleaved, biased: how the checkpoint stores experts, see `ExpertLayer`.
        input_norm: whether the input is normed.
    """

    hidden_size: int
    norm: RMSNorm
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    route: Route
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    swiglu: Swiglu = PLAIN
    transposed: bool = False
    interleaved: bool = False
    biased: bool = False
    input_norm: bool = True

    @classmethod
    def from_config(
        cls,
        cfg: MoEFFNConfig,
        route: Route,
        *,
        intermediate_size: int,
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        swiglu: Swiglu = PLAIN,
        transposed: bool = False,
        interleaved: bool = False,
        biased: bool = False,
        input_norm: bool = True,
    ) -> MoEFFN:
        """Sizes and norm from the config; what is peculiar to a family by keyword."""
        return cls(
            hidden_size=cfg.hidden_size,
            norm=cfg.norm,
            num_experts=cfg.num_experts,
            num_experts_per_tok=cfg.num_experts_per_tok,
            intermediate_size=intermediate_size,
            route=route,
            shared_intermediate_size=shared_intermediate_size or None,
            shared_gate=shared_gate,
            swiglu=swiglu,
            transposed=transposed,
            interleaved=interleaved,
            biased=biased,
            input_norm=input_norm,
        )

    @property
    def demand(self) -> Demand:
        """Its widths, and the rows of the router."""
        return Demand(
            intermediate_size=max(self.intermediate_size, self.shared_intermediate_size or 1),
            num_experts=self.num_experts + self.route.num_shared,
            num_experts_per_tok=self.num_experts_per_tok,
        )

    def parameters(self, prefix: str) -> list[Parameter]:
        """Norm, router and shared expert."""
        found = self.route.parameters(
            f"{prefix}mlp.gate.", self.num_experts, self.hidden_size, self.num_experts_per_tok
        )
        if self.input_norm:
            name = f"{prefix}post_attention_layernorm"
            found.insert(0, self.norm.parameter(name, self.hidden_size))
        if self.shared_intermediate_size:
            found += glu_parameters(
                f"{prefix}mlp.shared_expert.", self.hidden_size, self.shared_intermediate_size
            )
        for number in range(self.route.num_shared):
            prefix_of = f"{prefix}mlp.shared_experts.{number}."
            found += glu_parameters(prefix_of, self.hidden_size, self.intermediate_size)
        if self.shared_gate:
            found.append(
                Parameter(f"{prefix}mlp.shared_expert_gate.weight", (1, self.hidden_size), "router")
            )
        return found

    def expert_layer(self, layer: int, prefix: str) -> ExpertLayer:
        """What the checkpoint must hold of routed experts."""
        return ExpertLayer(
            layer,
            f"{prefix}mlp.experts",
            self.num_experts,
            self.hidden_size,
            self.intermediate_size,
            transposed=self.transposed,
            interleaved=self.interleaved,
            biased=self.biased,
        )

    def bind(self, site: Site) -> BoundMoE:
        """Router and experts as the kernels see them."""
        if site.experts is None:
            raise ValueError(f"layer {site.layer} was given no experts")
        weights, mlp = site.weights, f"{site.prefix}mlp."
        name = f"{site.prefix}post_attention_layernorm"
        norm = self.norm.bind(weights, name) if self.input_norm else None
        router = self.route.bind(weights, f"{mlp}gate.", norm, self.num_experts_per_tok)
        gate, up, down = site.experts.parts
        shared_gate = bind_linear(weights, f"{mlp}shared_expert_gate") if self.shared_gate else None
        experts = Experts(
            self.num_experts,
            gate,
            up,
            down,
            shared=self._shared(weights, mlp),
            shared_gate=shared_gate,
            swiglu=self.swiglu,
        )
        weighed = tuple(
            bind_glu(weights, f"{mlp}shared_experts.{number}.", swiglu=self.swiglu)
            for number in range(self.route.num_shared)
        )
        table = self.route.bind_table(weights, f"{mlp}gate.", self.num_experts)
        return BoundMoE(site.layer, router, experts, weighed, table)

    def _shared(self, weights: Weights, mlp: str) -> FFN | None:
        if not self.shared_intermediate_size:
            return None
        return bind_glu(weights, f"{mlp}shared_expert.", swiglu=self.swiglu)


@dataclass(frozen=True, slots=True, eq=False)
class BoundMoE(BoundSublayer):
    """A layer's router and experts, ready to compute.

    Attributes:
        weighed: shared experts that the router weighs, which are added in this order.
        table: `[V, A]` the experts of each token, where these do not depend on its state.
    """

    layer: int
    router: Router
    experts: Experts
    weighed: tuple[FFN, ...] = ()
    table: Floats | None = None

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """Route `x [T, D]`, lease what it needs, compute, add to `y`.

        A batch reads each expert once. A union larger than the arena is leased in ascending groups,
        which keeps the order of every sum.

        Raises:
            NumericsError: a router row is not finite.
            ReadError: the disk failed for one of the experts. Both name the `members` of the batch
                that they concern.
        """
        kernels, store = step.kernels, step.store
        routing = self._route(step, x)
        if step.routes is not None:
            step.routes(self.layer, routing)
        mixed = np.zeros(x.shape, np.float32)
        if len(routing.experts) <= store.capacity(self.layer):
            with store.lease(self.layer, routing.experts) as slots:
                if step.look_ahead is not None:
                    step.look_ahead(self.layer, routing.experts)
                self._add(step, routing, routing.experts, slots, mixed)
        else:
            self._add_in_groups(step, routing, mixed)
        if routing.shared is not None:
            for shared, weights in zip(self.weighed, routing.shared.T, strict=True):
                out = np.zeros_like(x)
                kernels.ffn_step(shared, routing.hidden, out)
                mixed += weights[:, None] * out
        kernels.moe_finish(self.experts, routing, mixed, y)

    def foresee(self, kernels: Kernels, x: Floats, ids: Ints) -> Ints:
        """What the router would choose for an earlier state `x [T, D]`, likeliest first.

        Nothing for a state that is not finite: whatever is wrong with it shows when its turn comes.
        """
        try:
            routing = kernels.route_step(self.router, x, self._given(ids))
        except NonFiniteRow:
            return NOTHING
        ranked = routing.ids.ravel()[np.argsort(-routing.weights, axis=None, kind="stable")]
        return ranked[np.sort(np.unique(ranked, return_index=True)[1])]

    def _add_in_groups(self, step: Step, routing: Routing, y: Floats) -> None:
        """Two groups share the arena: while one is computed, the next is being read."""
        store = step.store
        store.expect(self.layer, routing.experts)
        capacity = store.capacity(self.layer)
        groups = _groups(routing.experts, max(1, capacity // 2))
        leases = [store.lease(self.layer, group) for group in groups]
        if capacity == 1:
            for group, lease in zip(groups, leases, strict=True):
                with lease as slots:
                    self._add(step, routing, group, slots, y)
            return
        with ExitStack() as coming:
            slots = coming.enter_context(leases[0])
            for number, group in enumerate(groups):
                with coming.pop_all():
                    held = slots
                    for lease in leases[number + 1 : number + 2]:
                        slots = coming.enter_context(lease)
                    self._add(step, routing, group, held, y)

    def _add(self, step: Step, routing: Routing, experts: Ints, slots: Ints, y: Floats) -> None:
        try:
            step.kernels.moe_step(self.experts, routing, experts, slots, step.store.table, y)
        except SlotFailed as failed:
            wanted = np.isin(routing.ids, experts[slots == failed.slot]).any(axis=1)
            error = step.store.failure(failed.slot)
            error.members = frozenset(step.batch.members[wanted].tolist())
            raise error from None

    def _given(self, ids: Ints) -> Ints | None:
        return None if self.table is None else self.table[ids].astype(np.int32)

    def _route(self, step: Step, x: Floats) -> Routing:
        try:
            return step.kernels.route_step(self.router, x, self._given(step.ids))
        except NonFiniteRow as broken:
            position = int(step.batch.positions[broken.row])
            error = NumericsError(
                f"layer {self.layer}: the router's input at position {position} is not finite; the "
                "checkpoint's weights are damaged or overflow in float32: fetch it again"
            )
            error.members = frozenset((int(step.batch.members[broken.row]),))
            raise error from None


def _groups(experts: Ints, size: int) -> list[Ints]:
    return [experts[start : start + size] for start in range(0, len(experts), size)]
