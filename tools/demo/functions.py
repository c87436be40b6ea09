"""The costly parts of the demo model, forward and backward by hand, for speed on a CPU.

Matrices are multiplied in bf16 (several times faster than fp32 where the processor knows it) and
memory is passed over as few times as can be.  Shapes as in `model.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class Loss(torch.autograd.Function):
    """Mean cross-entropy of tied logits, in pieces that stay in the cache.

    x [N, H], embedding [V, H], target [N] -> [].  Both gradients are computed on the way forward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, embedding: Tensor, target: Tensor) -> Tensor:
        x, w = x.bfloat16(), embedding.bfloat16()
        total = torch.zeros(())
        d_x, d_w = torch.empty_like(x), torch.zeros(embedding.shape)
        for at in range(0, len(x), 512):
            rows, wanted = x[at : at + 512], target[at : at + 512, None]
            z = torch.mm(rows, w.t()).float()
            z -= z.amax(-1, keepdim=True)
            right = z.gather(1, wanted)
            norm = z.exp_().sum(-1, keepdim=True)
            total += (norm.log() - right).sum()
            z /= norm * len(x)
            z.scatter_add_(1, wanted, torch.full_like(norm, -1.0 / len(x)))
            d_z = z.bfloat16()
            torch.mm(d_z, w, out=d_x[at : at + 512])
            d_w += torch.mm(d_z.t(), rows)
        ctx.save_for_backward(d_x, d_w)
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        d_x, d_w = ctx.saved_tensors
        return d_x.float() * grad, d_w * grad, None


class Norm(torch.autograd.Function):
    """x [..., n], weight [n] -> x / rms(x) * weight; few passes over memory either way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, inverse, weight = ctx.saved_tensors
        both = grad * unit
        d_weight = both.flatten(0, -2).sum(0)
        inner = (both @ weight).unsqueeze(-1).div_(unit.shape[-1])
        d_x = (grad * weight).addcmul_(unit, inner, value=-1.0).mul_(inverse)
        return d_x, d_weight, None


PAD = 64


def _parts(sizes: list[int]) -> Iterator[tuple[int, slice]]:
    """Expert and its rows, for every expert that has any."""
    at = 0
    for e, size in enumerate(sizes):
        if size:
            yield e, slice(at, at + size)
        at += size


class Experts(torch.autograd.Function):
    """The routed SwiGLU experts, forward and backward in bf16, tokens sorted by expert.

    x [N, H], weights [N, K], ids [N, K], gate_up [E, 2I, H] (gate rows first), down [E, H, I]
    -> [N, H].  `silu(x gate^T) * (x up^T)`, times down^T, summed with the weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        n, k = ids.shape
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=gate_up.shape[0])
        # Every expert's rows start at a multiple of PAD: few distinct shapes, so that the matrix
        # library compiles few kernels.  The rows between are zero and add nothing.
        padded = (counts + PAD - 1) // PAD * PAD
        shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
        row = torch.arange(flat.numel()) + shift.index_select(0, flat.index_select(0, order))
        place = torch.empty_like(order)
        place[order] = row
        sizes = [int(c) for c in padded.tolist()]
        source = torch.full((sum(sizes),), n, dtype=torch.long)
        source[row] = order // k
        dtype = torch.bfloat16
        w_in, w_out = gate_up.to(dtype), down.to(dtype)
        rows = torch.cat([x.to(dtype), x.new_zeros(1, x.shape[1], dtype=dtype)])
        rows = rows.index_select(0, source)
        scale = torch.zeros(len(source), 1, dtype=dtype)
        scale[place] = weights.to(dtype).reshape(-1, 1)
        hidden = rows.new_empty(rows.shape[0], gate_up.shape[1])
        for e, part in _parts(sizes):
            torch.mm(rows[part], w_in[e].t(), out=hidden[part])
        gate, up = hidden.chunk(2, dim=-1)
        middle = functional.silu(gate).mul_(up)
        scaled = middle * scale
        out = torch.empty_like(rows)
        for e, part in _parts(sizes):
            torch.mm(scaled[part], w_out[e].t(), out=out[part])
        ctx.save_for_backward(place, source, scale, rows, hidden, middle, scaled, w_in, w_out)
        ctx.sizes = sizes
        return _sum_by_token(out, place.view(n, k))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        place, source, scale, rows, hidden, middle, scaled, w_in, w_out = ctx.saved_tensors
        n = len(grad)
        grad = grad.to(torch.bfloat16)
        d_out = torch.cat([grad, grad.new_zeros(1, grad.shape[1])]).index_select(0, source)
        d_scaled = torch.empty_like(middle)
        d_w_in, d_w_out = torch.zeros_like(w_in), torch.zeros_like(w_out)
        for e, part in _parts(ctx.sizes):
            torch.mm(d_out[part], w_out[e], out=d_scaled[part])
            torch.mm(d_out[part].t(), scaled[part], out=d_w_out[e])
        d_weights = (d_scaled * middle).sum(-1).index_select(0, place).view(n, -1)
        d_middle = d_scaled.mul_(scale)
        gate, up = hidden.chunk(2, dim=-1)
        sig = torch.sigmoid(gate)
        act = gate * sig
        d_hidden = torch.empty_like(hidden)
        d_gate, d_up = d_hidden.chunk(2, dim=-1)
        torch.mul(d_middle, act, out=d_up)
        torch.addcmul(sig, act, 1 - sig, out=d_gate).mul_(up).mul_(d_middle)
        d_rows = torch.empty_like(rows)
        for e, part in _parts(ctx.sizes):
            torch.mm(d_hidden[part], w_in[e], out=d_rows[part])
            torch.mm(d_hidden[part].t(), rows[part], out=d_w_in[e])
        d_x = _sum_by_token(d_rows, place.view(n, -1))
        return d_x.float(), d_weights.float(), None, d_w_in.float(), d_w_out.float()


def _sum_by_token(rows: Tensor, place: Tensor) -> Tensor:
    """rows [R, H], place [N, K] -> the sum of each token's K rows, [N, H]."""
    out = rows.index_select(0, place[:, 0])
    for column in place.unbind(1)[1:]:
        out += rows.index_select(0, column)
    return out


BLOCK = 128


class Attention(torch.autograd.Function):
    """Causal attention in bf16, a block of queries at a time against the keys it may see.

    q [G, r, T, D], k and v [G, 1, T, D], where G is sequences x key heads and r the query heads
    of a key head -> [G, r, T, D].  The r heads' queries of a block form one matrix.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        g, r, t, d = q.shape
        q, k, v = (q * d**-0.5).bfloat16(), k[:, 0].bfloat16(), v[:, 0].bfloat16()
        out, probabilities = torch.empty_like(q), []
        future = torch.full((BLOCK, BLOCK), float("-inf"), dtype=q.dtype).triu(1)
        for at in range(0, t, BLOCK):
            end = min(at + BLOCK, t)
            n = end - at
            s = torch.bmm(q[:, :, at:end].reshape(g, r * n, d), k[:, :end].transpose(1, 2))
            s.view(g, r, n, end)[..., at:] += future[:n, :n]
            p = s.softmax(-1)
            out[:, :, at:end] = torch.bmm(p, v[:, :end]).view(g, r, n, d)
            probabilities.append(p)
        ctx.save_for_backward(q, k, v, out, *probabilities)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, *probabilities = ctx.saved_tensors
        g, r, t, d = q.shape
        grad = grad.bfloat16()
        inner = (grad.float() * out.float()).sum(-1, keepdim=True).bfloat16()
        d_q = torch.empty_like(q)
        d_k, d_v = k.new_zeros(g, t, d).float(), v.new_zeros(g, t, d).float()
        for at, p in zip(range(0, t, BLOCK), probabilities, strict=True):
            end = min(at + BLOCK, t)
            n = end - at
            part = grad[:, :, at:end].reshape(g, r * n, d)
            d_v[:, :end] += torch.bmm(p.transpose(1, 2), part)
            d_s = torch.bmm(part, v[:, :end].transpose(1, 2))
            d_s = d_s.sub_(inner[:, :, at:end].reshape(g, r * n, 1)).mul_(p)
            d_q[:, :, at:end] = torch.bmm(d_s, k[:, :end]).view(g, r, n, d)
            d_k[:, :end] += torch.bmm(d_s.transpose(1, 2), q[:, :, at:end].reshape(g, r * n, d))
        return d_q.float() * d**-0.5, d_k.unsqueeze(1), d_v.unsqueeze(1)
