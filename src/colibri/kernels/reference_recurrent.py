"""Row operations and recurrences in NumPy; see `kernels.recurrent_api`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import Batch, CellLayer, Matrix
from colibri.kernels.recurrent_api import (
    Activation,
    DecayGate,
    DeltaRule,
    GroupNorm,
    Projections,
    ShortConv,
)
from colibri.kernels.reference_math import rms_norm, sigmoid, silu, softplus


class ReferenceRecurrent:
    """`RowKernels` and `RecurrentKernels` in NumPy; a part of `ReferenceKernels`."""

    @abstractmethod
    def matmul(self, matrix: Matrix, x: Floats) -> Floats:
        """See `Kernels.matmul`."""

    def project(self, layer: Projections, x: Floats) -> tuple[Floats, ...]:
        """One product after the other."""
        hidden = x if layer.norm is None else rms_norm(x, layer.norm)
        return tuple(self.matmul(matrix, hidden) for matrix in layer.matrices)

    def norm_rows(self, norm: GroupNorm, x: Floats, gate: Floats | None = None) -> Floats:
        """Group by group."""
        groups = x.reshape(len(x), x.shape[1] // norm.width, norm.width)
        squares = np.square(groups).sum(axis=-1, keepdims=True, dtype=np.float32)
        squares = squares if norm.of_sum else squares / np.float32(norm.width)
        out = groups / np.sqrt(squares + np.float32(norm.eps))
        if norm.weight is not None:
            out = out * norm.weight.reshape(-1, norm.width)
        flat: Floats = out.reshape(x.shape)
        if norm.gate is None:
            return flat
        if gate is None:
            raise ValueError(f"the norm is gated by {norm.gate} and needs a gate")
        return flat * (sigmoid(gate) if norm.gate == "sigmoid" else silu(gate))

    def activate(self, activation: Activation, x: Floats) -> Floats:
        """Element by element."""
        return _ACTIVATIONS[activation](x)

    def decay(self, gate: DecayGate, a: Floats) -> Floats:
        """In the order of the formula."""
        rate = np.exp(gate.a_log[: gate.num_heads])[:, None]
        inner = (a + gate.bias).reshape(len(a), gate.num_heads, -1)
        if gate.lower_bound is None:
            out = np.exp(-rate * softplus(inner))
        else:
            out = np.exp(np.float32(gate.lower_bound) * sigmoid(rate * inner))
        return out.reshape(a.shape)

    def short_conv(self, layer: ShortConv, x: Floats, batch: Batch, state: CellLayer) -> None:
        """Each sequence's rows behind the inputs that it kept."""
        channels, kernel = layer.weight.shape
        kept = (kernel - 1) * layer.dilation
        for member in np.unique(batch.members):
            here = np.flatnonzero(batch.members == member)
            past = cell_of(state, int(batch.cells[member]), (kept, channels))
            inputs = np.concatenate([past, x[here]])
            past[:] = inputs[len(here) :]
            out = np.zeros((len(here), channels), np.float32)
            for tap in range(kernel):
                first = tap * layer.dilation
                out += inputs[first : first + len(here)] * layer.weight[:, tap]
            out = out if layer.bias is None else out + layer.bias
            out = silu(out) if layer.silu else out
            x[here] = x[here] + out if layer.residual else out

    def delta_rule(
        self,
        layer: DeltaRule,
        q: Floats,
        k: Floats,
        v: Floats,
        decay: Floats,
        beta: Floats,
        batch: Batch,
        state: CellLayer,
    ) -> Floats:
        """Row by row, all heads at once."""
        tokens, heads, dk = len(q), layer.num_heads, layer.key_dim
        unit = GroupNorm(dk, layer.eps, of_sum=True)
        shape, repeats = (tokens, layer.num_key_heads, dk), heads // layer.num_key_heads
        keys = self.norm_rows(unit, k).reshape(shape).repeat(repeats, axis=1)  # [T, H, dk]
        queries = self.norm_rows(unit, q).reshape(shape).repeat(repeats, axis=1)
        queries = queries * np.float32(layer.scale)
        values = v.reshape(tokens, heads, layer.value_dim)
        factors = decay.reshape(tokens, heads, -1)
        out = np.empty_like(values)
        for t in range(tokens):
            cell = int(batch.cells[batch.members[t]])
            s = cell_of(state, cell, (heads, dk, layer.value_dim))
            s *= factors[t][:, :, None]
            found = np.einsum("hkv,hk->hv", s, keys[t])
            s += keys[t][:, :, None] * ((values[t] - found) * beta[t][:, None])[:, None]
            out[t] = np.einsum("hkv,hk->hv", s, queries[t])
        return out.reshape(tokens, -1)


_ACTIVATIONS: dict[Activation, Callable[[Floats], Floats]] = {
    "sigmoid": sigmoid,
    "silu": silu,
    "softplus": softplus,
    "exp": np.exp,
}


def cell_of(state: CellLayer, cell: int, shape: tuple[int, ...]) -> Floats:
    """A view of one sequence's state."""
    start = cell * state.cell_nbytes + state.offset
    size = 4 * int(np.prod(shape))
    return state.pool[start : start + size].view(np.float32).reshape(shape)
