"""The operations of `kernels.api` in NumPy: the oracle of native code, and its stand-in.

Weights are decoded to the exact float32 numbers of their format at every call, and inputs are
never coded (`activations` is always float32 here), so results differ from native ones by the error
that the format states, not by bits.
"""

from __future__ import annotations

import numpy as np

from colibri.formats import Floats, RowInt8Format
from colibri.kernels.api import (
    FAILED,
    FFN,
    KV_BLOCK,
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
    Norm,
    RopeTable,
    Router,
    Routing,
    SlotFailed,
    Slots,
    Swiglu,
)
from colibri.kernels.latent import LatentAttention, LatentCache
from colibri.kernels.reference_math import rms_norm, sigmoid, softmax
from colibri.kernels.reference_recurrent import ReferenceRecurrent


class ReferenceKernels(ReferenceRecurrent):
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
        """Project, write K and V into the pool, attend from the pool, add."""
        hidden = rms_norm(x, layer.norm)
        q, gate = self.matmul(layer.q_proj, hidden), None
        if layer.gated:
            pairs = q.reshape(len(x), layer.num_heads, 2, layer.head_dim)
            q, gate = pairs[:, :, 0].reshape(len(x), -1), pairs[:, :, 1]
        q = _heads(layer, q, layer.q_norm)  # [T, H, hd]
        k = _heads(layer, self.matmul(layer.k_proj, hidden), layer.k_norm)  # [T, K, hd]
        v = _heads(layer, self.matmul(layer.v_proj, hidden), None)
        q, k = rotate(q, rope, layer.rope_pairing), rotate(k, rope, layer.rope_pairing)
        pool = _PoolView(kv)
        pool.write(batch, k, v)
        mixed = np.empty_like(q)
        for member in np.unique(batch.members):
            rows = np.flatnonzero(batch.members == member)
            positions = batch.positions[rows]
            keys, values = pool.read(
                batch.block_tables[member], int(positions.max()) + 1
            )  # [S, K, hd]
            mixed[rows] = attend(
                q[rows], keys, values, positions, layer.scale, layer.window, layer.sinks
            )
        y = x if y is None else y
        mixed = mixed if gate is None else mixed * sigmoid(gate)
        y += self.matmul(layer.o_proj, mixed.reshape(len(x), -1))

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
        from colibri.kernels.reference_latent import latent_step  # it imports this module

        y = x if y is None else y
        y += latent_step(self.matmul, layer, x, batch, rope, cache, selected)

    def ffn_step(self, layer: FFN, x: Floats, y: Floats | None = None) -> None:
        """A dense layer."""
        hidden = x if layer.norm is None else rms_norm(x, layer.norm)
        y = x if y is None else y
        y += self._ffn(layer, hidden)

    def route_step(self, layer: Router, x: Floats) -> Routing:
        """Score, choose, weigh."""
        hidden = rms_norm(x, layer.norm)
        logits = self.matmul(layer.gate, hidden)  # [T, E]
        broken = np.flatnonzero(~np.isfinite(logits).all(axis=1))
        if broken.size:
            raise NonFiniteRow(int(broken[0]))
        scores = softmax(logits) if layer.scoring == "softmax" else sigmoid(logits)
        chosen = choose(layer, scores)
        weights = np.take_along_axis(scores, chosen, axis=1)
        if layer.normalize:
            weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(layer.epsilon))
        weights = weights * np.float32(layer.factor)
        return Routing(hidden, chosen, weights, np.unique(chosen))

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
                _part(table, slot, i, part)
                for i, part in enumerate((layer.gate_proj, layer.up_proj, layer.down_proj))
            )
            hidden = routing.hidden[rows]
            biases = [_bias(table, slot, i, n) for i, n in enumerate(map(len, (gate, up, down)))]
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
        return self.matmul(layer.lm_head, rms_norm(x, layer.norm))

    def matmul(self, matrix: Matrix, x: Floats) -> Floats:
        """Decode and multiply."""
        out = x @ _decoded(matrix).T
        return out if matrix.bias is None else out + matrix.bias

    def _ffn(self, layer: FFN, hidden: Floats) -> Floats:
        gate, up = self.matmul(layer.gate_proj, hidden), self.matmul(layer.up_proj, hidden)
        return self.matmul(layer.down_proj, swiglu(gate, up, layer.swiglu))


def _heads(layer: Attention, projected: Floats, norm: Norm | None) -> Floats:
    """Norm over a head or over the whole projection, clip; `[T, heads, head_dim]`."""
    width = projected.shape[1]
    if norm is not None and norm.weight.size == width:
        projected = rms_norm(projected, norm)
    out = projected.reshape(len(projected), -1, layer.head_dim)
    if norm is not None and norm.weight.size == layer.head_dim != width:
        out = rms_norm(out, norm)
    return out if layer.clip is None else np.clip(out, -layer.clip, layer.clip)


def swiglu(gate: Floats, up: Floats, act: Swiglu) -> Floats:
    """The gated activation of `Swiglu`."""
    if act.limit is not None:
        gate, up = np.minimum(gate, act.limit), np.clip(up, -act.limit, act.limit)
    out: Floats = gate * sigmoid(np.float32(act.alpha) * gate) * (up + np.float32(act.offset))
    return out


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


def rotate(x: Floats, rope: RopeTable, pairing: str) -> Floats:
    """Rotate the leading `2 * cos.shape[1]` dims of `x [T, heads, head_dim]`."""
    half = rope.cos.shape[1]
    if half == 0:
        return x
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    out = x.copy()
    if pairing == "half":
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def attend(
    q: Floats,
    k: Floats,
    v: Floats,
    positions: Ints,
    scale: float,
    window: int | None,
    sinks: Floats | None = None,
) -> Floats:
    """Causal attention of `q [T, H, hd]` over `k, v [S, K, hd]`; key j stands at position j."""
    rows, heads, head_dim = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, head_dim)  # [T, K, H/K, hd]
    scores = np.einsum("tkgd,skd->tkgs", grouped, k, optimize=True) * np.float32(scale)
    age = positions[:, None] - np.arange(len(k))
    seen = (age >= 0) if window is None else (age >= 0) & (age < window)
    masked = np.where(seen[:, None, None], scores, np.float32(-np.inf))
    if sinks is not None:
        column = np.broadcast_to(sinks.reshape(1, k.shape[1], -1, 1), (*scores.shape[:3], 1))
        masked = np.concatenate([masked, column], axis=3)
    weights = softmax(masked)[..., : len(k)]
    mixed = np.einsum("tkgs,skd->tkgd", weights, v, optimize=True)
    return np.asarray(mixed).reshape(rows, heads, head_dim)


class _PoolView:
    """A layer's K/V blocks in storage items: K `[blocks, K, hd, 64]`, V `[blocks, K, 64, hd]`."""

    def __init__(self, kv: KVLayer) -> None:
        self._format = kv.format
        blocks, heads = kv.pool.size // kv.block_nbytes, kv.num_kv_heads
        part = kv.format.nbytes((heads * KV_BLOCK, kv.head_dim))
        by_block = kv.pool[: blocks * kv.block_nbytes].reshape(blocks, kv.block_nbytes)
        parts = by_block[:, kv.offset : kv.offset + 2 * part].reshape(blocks, 2, part)
        dtype = np.dtype(np.int8) if isinstance(kv.format, RowInt8Format) else kv.format.dtype
        size = heads * KV_BLOCK * kv.head_dim * dtype.itemsize
        items = parts[:, :, :size].view(dtype)
        keys = items[:, 0].reshape(blocks, heads, kv.head_dim, KV_BLOCK)
        values = items[:, 1].reshape(blocks, heads, KV_BLOCK, kv.head_dim)
        scales = parts[:, :, size:].view(np.float32).reshape(blocks, 2, -1, KV_BLOCK)
        self._items = keys.transpose(0, 1, 3, 2), values  # both [blocks, K, 64, hd]
        self._scales = scales[:, 0], scales[:, 1]

    def write(self, batch: Batch, k: Floats, v: Floats) -> None:
        blocks = batch.block_tables[batch.members, batch.positions // KV_BLOCK]
        place = batch.positions % KV_BLOCK
        for items, all_scales, rows in zip(self._items, self._scales, (k, v), strict=True):
            if isinstance(self._format, RowInt8Format):
                codes, scales = self._format.round(rows)
                items[blocks, :, place] = codes
                all_scales[blocks, :, place] = scales
            else:
                items[blocks, :, place] = self._format.from_float32(rows)

    def read(self, table: Ints, length: int) -> tuple[Floats, Floats]:
        blocks = table[: -(-length // KV_BLOCK)]
        return self._part(0, blocks, length), self._part(1, blocks, length)

    def _part(self, which: int, blocks: Ints, length: int) -> Floats:
        items = self._items[which][blocks]  # [B, K, 64, hd]
        if isinstance(self._format, RowInt8Format):
            wide = items.astype(np.float32) * self._scales[which][blocks][..., None]
        else:
            wide = self._format.to_float32(items)
        by_position: Floats = wide.transpose(0, 2, 1, 3)
        return by_position.reshape(-1, *by_position.shape[2:])[:length]


def _decoded(matrix: Matrix) -> Floats:
    return matrix.format.decode(matrix.data, (matrix.rows, matrix.columns))


def _bias(table: Slots, slot: int, index: int, size: int) -> Floats:
    if table.biases is None:
        return np.zeros(size, np.float32)
    start = int(table.biases[slot, index])
    return table.arena[start : start + 4 * size].view(np.float32)


def _part(table: Slots, slot: int, index: int, part: ExpertPart) -> Floats:
    """Gather the panels of one part, which may alternate with another's, and decode them."""
    start, panel = int(table.parts[slot, index]), part.format.panel_nbytes(part.columns)
    size = part.format.resident_nbytes((part.rows, part.columns))
    panels = -(-size // panel)
    if part.panel_stride == panel:
        return part.format.decode(table.arena[start : start + size], (part.rows, part.columns))
    strided = np.lib.stride_tricks.as_strided(
        table.arena[start:], (panels, panel), (part.panel_stride, 1)
    )
    return part.format.decode(strided.reshape(-1)[:size], (part.rows, part.columns))
