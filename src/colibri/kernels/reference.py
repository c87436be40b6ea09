"""The operations of `kernels.api` in NumPy: the oracle of native code, and its stand-in.

Weights are decoded to the exact float32 numbers of their format at every call, and inputs are
never coded (`activations` is always float32 here), so results differ from native ones by the error
that the format states, not by bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from colibri.formats import Floats
from colibri.kernels.api import (
    FAILED,
    FFN,
    Activations,
    Attention,
    Batch,
    ExpertPart,
    Experts,
    Head,
    Ints,
    KVLayer,
    Limits,
    Matrix,
    NonFiniteRow,
    RopeTable,
    Router,
    Routing,
    SlotFailed,
    Slots,
    Swiglu,
)
from colibri.kernels.latent import LatentAttention, LatentCache
from colibri.kernels.reference_gated import ReferenceGated
from colibri.kernels.reference_heads import ReferenceHeads
from colibri.kernels.reference_latent import latent_step
from colibri.kernels.reference_math import rms_norm, sigmoid, softmax, softplus
from colibri.kernels.reference_recurrent import ReferenceRecurrent
from colibri.kernels.reference_shared_key import ReferenceSharedKey
from colibri.kernels.reference_streams import ReferenceStreams


class ReferenceKernels(
    ReferenceGated, ReferenceHeads, ReferenceRecurrent, ReferenceSharedKey, ReferenceStreams
):
    """`Kernels` in NumPy; slow, since every matrix is decoded at every use."""

    name = "reference"
    activations = Activations.FLOAT32

    def workspace_nbytes(self, limits: Limits) -> int:
        """NumPy's temporaries at their peak: the widest decoded matrices and the widest rows."""
        widest = max(limits.intermediate_size, limits.attention_width, limits.num_experts)
        decoded = 3 * limits.hidden_size * widest + limits.hidden_size * limits.vocab_size
        rows = limits.rows * (4 * limits.hidden_size + 4 * widest)
        m = limits.latent
        latent = m.heads * (2 * m.head_dim * m.rank + 4 * limits.rows * (m.head_dim + m.key))
        scores = m.index_heads * (m.index_positions + limits.rows * m.index_dim)
        return 4 * (decoded + rows + latent + scores)

    def reserve(self, limits: Limits) -> None:
        """Nothing to reserve: NumPy allocates as it goes."""

    def embed(self, table: Matrix, ids: Ints) -> Floats:
        """Rows of the decoded table."""
        return _decoded(table)[ids]

    def attention_step(
        self,
        layer: Attention,
        x: Floats,
        batch: Batch,
        rope: RopeTable,
        kv: KVLayer,
        y: Floats | None = None,
    ) -> None:
        """Project, attend, project, add."""
        hidden = rms_norm(x, layer.norm)
        q, k, v = (self.matmul(m, hidden) for m in (layer.q_proj, layer.k_proj, layer.v_proj))
        mixed = self.attend(layer, q, k, v, batch, rope, kv)
        y = x if y is None else y
        y += self.matmul(layer.o_proj, mixed)

    def latent_step(
        self,
        layer: LatentAttention,
        x: Floats,
        batch: Batch,
        rope: RopeTable,
        cache: LatentCache,
        selected: Ints | None = None,
        y: Floats | None = None,
    ) -> None:
        """See `kernels.reference_latent`."""
        y = x if y is None else y
        y += latent_step(self.matmul, layer, x, batch, rope, cache, selected)

    def ffn_step(self, layer: FFN, x: Floats, y: Floats | None = None) -> None:
        """A dense layer."""
        hidden = x if layer.norm is None else rms_norm(x, layer.norm)
        y = x if y is None else y
        y += self._ffn(layer, hidden)

    def route_step(self, layer: Router, x: Floats, given: Ints | None = None) -> Routing:
        """Score, choose where nobody has, weigh."""
        hidden = x if layer.norm is None else rms_norm(x, layer.norm)
        logits = self.matmul(layer.gate, hidden)  # [T, E]
        broken = np.flatnonzero(~np.isfinite(logits).all(axis=1))
        if broken.size:
            raise NonFiniteRow(int(broken[0]))
        scores = _SCORES[layer.scoring](logits)
        routed, shared = np.split(scores, [layer.num_routed], axis=1)
        chosen = choose(layer, routed) if given is None else given
        weights = np.concatenate([np.take_along_axis(routed, chosen, axis=1), shared], axis=1)
        if layer.normalize:
            weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(layer.epsilon))
        weights = weights * np.float32(layer.factor)
        own, shared = np.split(weights, [layer.num_experts_per_tok], axis=1)
        experts = np.unique(chosen)
        return Routing(hidden, chosen, own, experts, shared if layer.num_shared else None)

    def moe_step(
        self, layer: Experts, routing: Routing, experts: Ints, slots: Ints, table: Slots, y: Floats
    ) -> None:
        """Experts one after another, ascending."""
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            table.wait(slot)
            if table.states[slot] == FAILED:
                raise SlotFailed(slot)
            rows, rank = np.nonzero(routing.ids == expert)
            gate, up, down = (
                expert_part(table, slot, i, part)
                for i, part in enumerate((layer.gate_proj, layer.up_proj, layer.down_proj))
            )
            hidden = routing.hidden[rows]
            biases = [
                expert_bias(table, slot, i, n) for i, n in enumerate(map(len, (gate, up, down)))
            ]
            mixed = swiglu(hidden @ gate.T + biases[0], hidden @ up.T + biases[1], layer.swiglu)
            y[rows] += routing.weights[rows, rank, None] * (mixed @ down.T + biases[2])

    def moe_finish(self, layer: Experts, routing: Routing, y: Floats, x: Floats) -> None:
        """Shared expert and residual."""
        if layer.shared is not None:
            out = self._ffn(layer.shared, routing.hidden)
            if layer.shared_gate is not None:
                out = out * sigmoid(self.matmul(layer.shared_gate, routing.hidden))
            y += out
        x += y

    def head_step(self, layer: Head, x: Floats) -> Floats:
        """Final norm and projection."""
        return self.matmul(layer.lm_head, x if layer.norm is None else rms_norm(x, layer.norm))

    def matmul(self, matrix: Matrix, x: Floats) -> Floats:
        """Decode and multiply."""
        out = x @ _decoded(matrix).T
        return out if matrix.bias is None else out + matrix.bias

    def _ffn(self, layer: FFN, hidden: Floats) -> Floats:
        gate, up = self.matmul(layer.gate_proj, hidden), self.matmul(layer.up_proj, hidden)
        return self.matmul(layer.down_proj, swiglu(gate, up, layer.swiglu))


def swiglu(gate: Floats, up: Floats, act: Swiglu) -> Floats:
    """The gated activation of `Swiglu`."""
    if act.limit is not None:
        gate, up = np.minimum(gate, act.limit), np.clip(up, -act.limit, act.limit)
    out: Floats = gate * sigmoid(np.float32(act.alpha) * gate) * (up + np.float32(act.offset))
    return out


_SCORES: dict[str, Callable[[Floats], Floats]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sqrtsoftplus": lambda logits: np.sqrt(softplus(logits)),
}


def choose(layer: Router, scores: Floats) -> Ints:
    """Ids `[T, A]` by descending choice, ties to the lowest."""
    choice = scores if layer.bias is None else scores + layer.bias
    if layer.num_groups > 1:
        groups = choice.reshape(len(choice), layer.num_groups, -1)
        best = -np.sort(-groups, axis=2)[:, :, : layer.group_top].sum(axis=2)  # [T, groups]
        order = np.argsort(-best, axis=1, kind="stable")[:, layer.num_groups_used :]
        groups = groups.copy()
        np.put_along_axis(groups, order[:, :, None], np.float32(-np.inf), axis=1)
        choice = groups.reshape(choice.shape)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : layer.num_experts_per_tok]
    return ids.astype(np.int32)


def _decoded(matrix: Matrix) -> Floats:
    return matrix.format.decode(matrix.data, (matrix.rows, matrix.columns))


def expert_bias(table: Slots, slot: int, index: int, size: int) -> Floats:
    """The bias `[N]` of part `index` in a slot; zeros where experts have none."""
    if table.biases is None:
        return np.zeros(size, np.float32)
    start = int(table.biases[slot, index])
    return table.arena[start : start + 4 * size].view(np.float32)


def expert_part(table: Slots, slot: int, index: int, part: ExpertPart) -> Floats:
    """The weights `[N, K]` of part `index` in a slot; its panels may alternate with another's."""
    start, panel = int(table.parts[slot, index]), part.format.panel_nbytes(part.columns)
    size = part.format.resident_nbytes((part.rows, part.columns))
    panels = -(-size // panel)
    if part.panel_stride == panel:
        return part.format.decode(table.arena[start : start + size], (part.rows, part.columns))
    strided = np.lib.stride_tricks.as_strided(
        table.arena[start:], (panels, panel), (part.panel_stride, 1)
    )
    return part.format.decode(strided.reshape(-1)[:size], (part.rows, part.columns))
