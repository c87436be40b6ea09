"""Linear attention by the delta rule: gated delta nets, and Kimi's with a decay for each channel.

Both are short convolutions of q, k and v, the rule (`kernels.recurrent_api.DeltaRule`), a gated
norm of each head and an output projection; they differ in their tensors and in what decays.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import CellLayer, Kernels, Matrix, Norm
from colibri.kernels.recurrent_api import (
    DecayGate,
    DeltaRule,
    GroupNorm,
    Projections,
    ShortConv,
    conv_state_nbytes,
)
from colibri.kv import StateShape
from colibri.nn.cell import shares, shares_nbytes
from colibri.nn.norm import RMSNorm
from colibri.nn.parameter import Parameter, Weights, bind_linear, linear
from colibri.nn.sublayer import BoundSublayer, Demand, Site, Step, Sublayer


class Operands(NamedTuple):
    """What a mixer makes of its input: rows of convolutions, of the decay, of beta, of the gate."""

    convolved: tuple[Floats, ...]  # [q | k | v], or q, k, v
    decay: Floats
    beta: Floats
    gate: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaMixer(Sublayer):
    """What both kinds have.

    Attributes:
        num_heads: of values; each key head serves `num_heads / num_key_heads` of them.
        kernel: taps of the convolutions.
        norm: of the input; that of the output has plain weights and the same eps.
        input_norm: whether the input is normed.
    """

    hidden_size: int
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm: RMSNorm
    input_norm: bool = True

    @property
    def keys(self) -> int:
        """Columns of q, and of k."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of v, of the gate and of the output."""
        return self.num_heads * self.value_dim

    @property
    @abstractmethod
    def rule(self) -> DeltaRule:
        """The recurrence."""

    @property
    @abstractmethod
    def convolved(self) -> tuple[int, ...]:
        """Channels of each convolution."""

    @property
    def state_sizes(self) -> list[int]:
        """Bytes of the inputs that each convolution keeps, then of the rule's state."""
        convs = [conv_state_nbytes(channels, self.kernel) for channels in self.convolved]
        return [*convs, self.rule.state_nbytes]

    @property
    def state(self) -> StateShape:
        """Nothing that grows."""
        return StateShape(cell_nbytes=shares_nbytes(self.state_sizes))

    @property
    def demand(self) -> Demand:
        """The widest product; q, k, v, gate and outputs, some of them twice, as arrays."""
        width = 4 * self.keys + 6 * self.values + self.hidden_size
        return Demand(attention_width=max(self.keys, self.values), run_width=width)

    def norm_parameters(self, prefix: str) -> list[Parameter]:
        """Of the input."""
        name = f"{prefix}input_layernorm"
        return [self.norm.parameter(name, self.hidden_size)] if self.input_norm else []

    def bind_norm(self, weights: Weights, prefix: str) -> Norm | None:
        """Of the input."""
        return self.norm.bind(weights, f"{prefix}input_layernorm") if self.input_norm else None

    def bind_convs(self, weights: Weights, names: tuple[str, ...]) -> tuple[ShortConv, ...]:
        """The convolutions of those weights."""
        return tuple(
            ShortConv(weights.vector(name).reshape(channels, self.kernel), silu=True)
            for name, channels in zip(names, self.convolved, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet(DeltaMixer):
    """One decay a head, one convolution over q, k and v.

    Attributes:
        interleaved: whether the projections are stored key head by key head, as `[q | k | v | z]`
            and `[b | a]` of each, or each for itself.
        gate: what is made of z, by which the output is multiplied.
    """

    interleaved: bool = False
    gate: Literal["sigmoid", "silu"] = "silu"

    @property
    def rule(self) -> DeltaRule:
        """One decay a head."""
        scale = self.key_dim**-0.5
        return DeltaRule(self.num_key_heads, self.num_heads, self.key_dim, self.value_dim, scale)

    @property
    def convolved(self) -> tuple[int, ...]:
        """q, k and v side by side."""
        return (2 * self.keys + self.values,)

    @property
    def projections(self) -> dict[str, int]:
        """Input projections and their rows."""
        mixed, heads = 2 * self.keys + self.values, self.num_heads
        if self.interleaved:
            return {"in_proj_qkvz": mixed + self.values, "in_proj_ba": 2 * heads}
        return {
            "in_proj_qkv": mixed,
            "in_proj_z": self.values,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }

    def parameters(self, prefix: str) -> list[Parameter]:
        """Norm, projections, convolution, decay, norm of the output."""
        attn, channels = f"{prefix}linear_attn.", self.convolved[0]
        found = self.norm_parameters(prefix)
        for name, rows in self.projections.items():
            found += linear(attn + name, rows, self.hidden_size)
        return [
            *found,
            Parameter(f"{attn}conv1d.weight", (channels, 1, self.kernel), "filter"),
            Parameter(f"{attn}A_log", (self.num_heads,), "bias"),
            Parameter(f"{attn}dt_bias", (self.num_heads,), "bias"),
            Parameter(f"{attn}norm.weight", (self.value_dim,), "norm"),
            *linear(f"{attn}out_proj", self.hidden_size, self.values),
        ]

    def bind(self, site: Site) -> BoundDelta:
        """Join it to its weights and its share of the cells."""
        attn, weights = f"{site.prefix}linear_attn.", site.weights
        *conv_states, state = shares(site.state.cells, self.state_sizes)
        matrices = tuple(bind_linear(weights, attn + name) for name in self.projections)
        norm = self.bind_norm(weights, site.prefix)
        out_norm = weights.vector(f"{attn}norm.weight")
        a_log, bias = weights.vector(f"{attn}A_log"), weights.vector(f"{attn}dt_bias")
        return BoundGatedDeltaNet(
            projections=Projections(matrices, norm),
            convs=self.bind_convs(weights, (f"{attn}conv1d.weight",)),
            conv_states=tuple(conv_states),
            gate=DecayGate(a_log, bias, self.num_heads),
            rule=self.rule,
            state=state,
            out_norm=GroupNorm(self.value_dim, self.norm.eps, out_norm, gate=self.gate),
            out_proj=bind_linear(weights, f"{attn}out_proj"),
            interleaved=self.interleaved,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaAttention(DeltaMixer):
    """One decay a key channel; q, k and v have a convolution each.

    Decay and output gate come from low-rank projections, `f_b(f_a x)` and `g_b(g_a x)`, or where
    `full_rank` names them from `f_proj` and `g_proj`.

    Attributes:
        lower_bound: of the logarithm of the decay, where it has one.
        a_log_shape: how `A_log` is stored; of more numbers than heads the first count.
    """

    full_rank: frozenset[Literal["f", "g"]] = frozenset()
    lower_bound: float | None = None
    a_log_shape: tuple[int, ...]

    @property
    def rule(self) -> DeltaRule:
        """One decay a key channel."""
        return DeltaRule(
            self.num_key_heads,
            self.num_heads,
            self.key_dim,
            self.value_dim,
            self.key_dim**-0.5,
            "channel",
        )

    @property
    def convolved(self) -> tuple[int, ...]:
        """q, k and v."""
        return (self.keys, self.keys, self.values)

    def _low_rank(self, gate: Literal["f", "g"]) -> dict[str, int]:
        if gate in self.full_rank:
            return {f"{gate}_proj": self.values if gate == "g" else self.num_heads * self.key_dim}
        return {f"{gate}_a_proj": self.value_dim if gate == "g" else self.key_dim}

    @property
    def projections(self) -> dict[str, int]:
        """What is projected from the input, and its rows."""
        mixed = {"q_proj": self.keys, "k_proj": self.keys, "v_proj": self.values}
        return {**mixed, **self._low_rank("f"), **self._low_rank("g"), "b_proj": self.num_heads}

    @property
    def second(self) -> dict[str, tuple[int, int]]:
        """What is projected from a low rank: rows and columns."""
        found: dict[str, tuple[int, int]] = {}
        if "f" not in self.full_rank:
            found["f_b_proj"] = self.num_heads * self.key_dim, self.key_dim
        if "g" not in self.full_rank:
            found["g_b_proj"] = self.values, self.value_dim
        return found

    def parameters(self, prefix: str) -> list[Parameter]:
        """Norm, projections, convolutions, decay, norm of the output."""
        attn = f"{prefix}self_attn."
        found = self.norm_parameters(prefix)
        for name, rows in self.projections.items():
            found += linear(attn + name, rows, self.hidden_size)
        for name, (rows, columns) in self.second.items():
            found += linear(attn + name, rows, columns)
        for name, channels in zip("qkv", self.convolved, strict=True):
            shape = (channels, 1, self.kernel)
            found.append(Parameter(f"{attn}{name}_conv1d.weight", shape, "filter"))
        return [
            *found,
            Parameter(f"{attn}A_log", self.a_log_shape, "bias"),
            Parameter(f"{attn}dt_bias", (self.num_heads * self.key_dim,), "bias"),
            Parameter(f"{attn}o_norm.weight", (self.value_dim,), "norm"),
            *linear(f"{attn}o_proj", self.hidden_size, self.values),
        ]

    def bind(self, site: Site) -> BoundDelta:
        """Join it to its weights and its share of the cells."""
        attn, weights = f"{site.prefix}self_attn.", site.weights
        *conv_states, state = shares(site.state.cells, self.state_sizes)
        matrices = tuple(bind_linear(weights, attn + name) for name in self.projections)
        norm = self.bind_norm(weights, site.prefix)
        out_norm = weights.vector(f"{attn}o_norm.weight")
        a_log, bias = weights.vector(f"{attn}A_log"), weights.vector(f"{attn}dt_bias")
        return BoundKimiDelta(
            projections=Projections(matrices, norm),
            convs=self.bind_convs(weights, tuple(f"{attn}{n}_conv1d.weight" for n in "qkv")),
            conv_states=tuple(conv_states),
            gate=DecayGate(a_log, bias, self.num_heads, self.lower_bound),
            rule=self.rule,
            state=state,
            out_norm=GroupNorm(self.value_dim, self.norm.eps, out_norm, gate="sigmoid"),
            out_proj=bind_linear(weights, f"{attn}o_proj"),
            second={name[0]: bind_linear(weights, attn + name) for name in self.second},
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BoundDelta(BoundSublayer):
    """Linear attention, ready to compute."""

    projections: Projections
    convs: tuple[ShortConv, ...]
    conv_states: tuple[CellLayer, ...]
    gate: DecayGate
    rule: DeltaRule
    state: CellLayer
    out_norm: GroupNorm
    out_proj: Matrix

    @abstractmethod
    def operands(self, kernels: Kernels, x: Floats) -> Operands:
        """What is made of `x [T, D]`."""

    def step(self, step: Step, x: Floats, y: Floats) -> None:
        """See `BoundSublayer.step`."""
        for rows, run in step.runs():
            self._run(run, x[rows], y[rows])

    def _run(self, step: Step, x: Floats, y: Floats) -> None:
        kernels, batch = step.kernels, step.batch
        found = self.operands(kernels, x)
        for conv, rows, state in zip(self.convs, found.convolved, self.conv_states, strict=True):
            kernels.short_conv(conv, rows, batch, state)
        q, k, v = self._split(found.convolved)
        decay = kernels.decay(self.gate, found.decay)
        beta = kernels.activate("sigmoid", found.beta)
        out = kernels.delta_rule(self.rule, q, k, v, decay, beta, batch, self.state)
        y += kernels.matmul(self.out_proj, kernels.norm_rows(self.out_norm, out, found.gate))

    def _split(self, convolved: tuple[Floats, ...]) -> tuple[Floats, Floats, Floats]:
        if len(convolved) == 1:
            (mixed,), keys = convolved, self.rule.num_key_heads * self.rule.key_dim
            return mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]
        q, k, v = convolved
        return q, k, v


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BoundGatedDeltaNet(BoundDelta):
    """A gated delta net, ready to compute."""

    interleaved: bool

    def operands(self, kernels: Kernels, x: Floats) -> Operands:
        """Project; what is stored key head by key head is sorted by what it is."""
        if not self.interleaved:
            mixed, gate, beta, decay = kernels.project(self.projections, x)
            return Operands((mixed,), decay, beta, gate)
        both, small = kernels.project(self.projections, x)
        rows, rule = len(x), self.rule
        heads, keys, ratio = rule.num_key_heads, rule.key_dim, rule.num_heads // rule.num_key_heads
        by_head = both.reshape(rows, heads, -1)
        ends = [keys, 2 * keys, 2 * keys + ratio * rule.value_dim]
        *qkv, gate = (part.reshape(rows, -1) for part in np.split(by_head, ends, axis=2))
        beta, decay = np.split(small.reshape(rows, heads, -1), [ratio], axis=2)
        mixed = np.concatenate(qkv, axis=1)
        return Operands((mixed,), decay.reshape(rows, -1), beta.reshape(rows, -1), gate)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BoundKimiDelta(BoundDelta):
    """Kimi delta attention, ready to compute.

    Attributes:
        second: the second factor of the decay ("f") and of the gate ("g"), where they have one.
    """

    second: dict[str, Matrix]

    def operands(self, kernels: Kernels, x: Floats) -> Operands:
        """Project, and project what has a low rank again."""
        q, k, v, decay, gate, beta = kernels.project(self.projections, x)
        if "f" in self.second:
            decay = kernels.matmul(self.second["f"], decay)
        if "g" in self.second:
            gate = kernels.matmul(self.second["g"], gate)
        return Operands((q, k, v), decay, beta, gate)
