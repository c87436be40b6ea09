"""The operations of `kernels.api` in NumPy: the oracle of native code, and its stand-in.

Weights are decoded to the exact float32 numbers of their format at every call, and inputs are
never coded (`activations` is always float32 here), so results differ from native ones by the error
that the format states, not by bits.
"""

from __future__ import annotations

import numpy as np

from colibri.formats import Floats
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
)


class ReferenceKernels:
    """`Kernels` in NumPy; slow, since every matrix is decoded at every use."""

    name = "reference"
    activations = Activations.FLOAT32

    def workspace_nbytes(self, limits: Limits) -> int:
        """NumPy's temporaries at their peak: the widest decoded matrices and the widest rows."""
        widest = max(limits.intermediate_size, limits.attention_width, limits.num_experts)
        decoded = 3 * limits.hidden_size * widest + limits.hidden_size * limits.vocab_size
        rows = limits.rows * (4 * limits.hidden_size + 4 * widest)
        return 4 * (decoded + rows)

    def reserve(self, limits: Limits) -> None:
        """Nothing to reserve: NumPy allocates as it goes."""

    def embed(self, table: Matrix, ids: Ints) -> Floats:
        """Rows of the decoded table."""
        return _decoded(table)[ids]

    def attention_step(
        self, layer: Attention, x: Floats, batch: Batch, rope: RopeTable, kv: KVLayer
    ) -> None:
        """Project, write K and V into the pool, attend from the pool, add to `x`."""
        hidden = rms_norm(x, layer.norm)
        q = self._heads(layer, layer.q_proj, layer.q_norm, layer.num_heads, hidden)  # [T, H, hd]
        k = self._heads(layer, layer.k_proj, layer.k_norm, layer.num_kv_heads, hidden)  # [T, K, hd]
        v = self._heads(layer, layer.v_proj, None, layer.num_kv_heads, hidden)
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
            mixed[rows] = attend(q[rows], keys, values, positions, layer.scale, layer.window)
        x += self.matmul(layer.o_proj, mixed.reshape(len(x), -1))

    def ffn_step(self, layer: FFN, x: Floats) -> None:
        """A dense layer."""
        hidden = x if layer.norm is None else rms_norm(x, layer.norm)
        x += self._ffn(layer, hidden)

    def route_step(self, layer: Router, x: Floats) -> Routing:
        """Softmax over all experts, then top-k."""
        hidden = rms_norm(x, layer.norm)
        logits = self.matmul(layer.gate, hidden)  # [T, E]
        broken = np.flatnonzero(~np.isfinite(logits).all(axis=1))
        if broken.size:
            raise NonFiniteRow(int(broken[0]))
        probabilities = softmax(logits)
        ids = np.argsort(-probabilities, axis=1, kind="stable")[:, : layer.num_experts_per_tok]
        weights = np.take_along_axis(probabilities, ids, axis=1)
        if layer.normalize:
            weights = weights / weights.sum(axis=1, keepdims=True)
        chosen = ids.astype(np.int32)
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
            mixed = silu(hidden @ gate.T) * (hidden @ up.T)
            y[rows] += routing.weights[rows, rank, None] * (mixed @ down.T)

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

    def _heads(
        self, layer: Attention, matrix: Matrix, norm: Norm | None, heads: int, hidden: Floats
    ) -> Floats:
        """Project, norm over a head or over the whole projection, clip; `[T, heads, head_dim]`."""
        out = self.matmul(matrix, hidden)
        if norm is not None and norm.weight.size == out.shape[1]:
            out = rms_norm(out, norm)
        out = out.reshape(len(hidden), heads, layer.head_dim)
        if norm is not None and norm.weight.size == layer.head_dim != matrix.rows:
            out = rms_norm(out, norm)
        return out if layer.clip is None else np.clip(out, -layer.clip, layer.clip)

    def _ffn(self, layer: FFN, hidden: Floats) -> Floats:
        mixed = silu(self.matmul(layer.gate_proj, hidden)) * self.matmul(layer.up_proj, hidden)
        return self.matmul(layer.down_proj, mixed)


def rms_norm(x: Floats, norm: Norm) -> Floats:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""
    mean = np.square(x).mean(axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(norm.eps)) * norm.weight)


def sigmoid(x: Floats) -> Floats:
    """`1 / (1 + exp(-x))`, without overflow for large negative x."""
    half = np.exp(-np.abs(x))
    out: Floats = np.where(x >= 0, 1, half) / (1 + half)
    return out


def silu(x: Floats) -> Floats:
    """`x * sigmoid(x)`."""
    return x * sigmoid(x)


def softmax(x: Floats) -> Floats:
    """Over the last axis, maximum subtracted."""
    raised = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Floats = raised / raised.sum(axis=-1, keepdims=True)
    return out


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
    q: Floats, k: Floats, v: Floats, positions: Ints, scale: float, window: int | None
) -> Floats:
    """Causal attention of `q [T, H, hd]` over `k, v [S, K, hd]`; key j stands at position j."""
    rows, heads, head_dim = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, head_dim)  # [T, K, H/K, hd]
    scores = np.einsum("tkgd,skd->tkgs", grouped, k, optimize=True) * np.float32(scale)
    age = positions[:, None] - np.arange(len(k))
    seen = (age >= 0) if window is None else (age >= 0) & (age < window)
    weights = softmax(np.where(seen[:, None, None], scores, np.float32(-np.inf)))
    mixed = np.einsum("tkgs,skd->tkgd", weights, v, optimize=True)
    return np.asarray(mixed).reshape(rows, heads, head_dim)


class _PoolView:
    """A layer's K/V blocks as arrays of storage items `[blocks, 2, K, 64, head_dim]`."""

    def __init__(self, kv: KVLayer) -> None:
        self._format = kv.format
        items = kv.format.dtype
        count = 2 * kv.num_kv_heads * KV_BLOCK * kv.head_dim
        blocks = kv.pool.size // kv.block_nbytes
        shape = (blocks, 2, kv.num_kv_heads, KV_BLOCK, kv.head_dim)
        by_block = kv.pool[: blocks * kv.block_nbytes].reshape(blocks, kv.block_nbytes)
        self._items = (
            by_block[:, kv.offset : kv.offset + count * items.itemsize]
            .view(items)
            .reshape(shape)  # splits the last axis only, so it stays a view
        )

    def write(self, batch: Batch, k: Floats, v: Floats) -> None:
        blocks = batch.block_tables[batch.members, batch.positions // KV_BLOCK]
        place = batch.positions % KV_BLOCK
        self._items[blocks, 0, :, place] = self._format.from_float32(k)
        self._items[blocks, 1, :, place] = self._format.from_float32(v)

    def read(self, table: Ints, length: int) -> tuple[Floats, Floats]:
        blocks = self._items[table[: -(-length // KV_BLOCK)]]  # [B, 2, K, 64, hd]
        wide: Floats = self._format.to_float32(blocks).transpose(1, 0, 3, 2, 4)
        flat = wide.reshape(2, -1, *wide.shape[3:])[:, :length]
        return flat[0], flat[1]


def _decoded(matrix: Matrix) -> Floats:
    return matrix.format.decode(matrix.data, (matrix.rows, matrix.columns))


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
