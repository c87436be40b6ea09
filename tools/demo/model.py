"""The demo model in plain torch: a `qwen3_moe` decoder written for fast training on a CPU.

Shapes: B sequences, T positions, N = B*T tokens, H hidden size, D head size, E experts,
K experts a token, I expert width, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the names are those of the published configuration where one exists."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 128
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class _Loss(torch.autograd.Function):
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


class RMSNorm(nn.Module):
    """x [..., n] -> x / rms(x) * weight, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


PAD = 64


def _parts(sizes: list[int]) -> Iterator[tuple[int, slice]]:
    """Expert and its rows, for every expert that has any."""
    at = 0
    for e, size in enumerate(sizes):
        if size:
            yield e, slice(at, at + size)
        at += size


class _Experts(torch.autograd.Function):
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
        rows = torch.cat([x.to(dtype), x.new_zeros(1, x.shape[1], dtype=dtype)])[source]
        hidden = rows.new_empty(rows.shape[0], gate_up.shape[1])
        for e, part in _parts(sizes):
            torch.mm(rows[part], w_in[e].t(), out=hidden[part])
        gate, up = hidden.chunk(2, dim=-1)
        middle = functional.silu(gate) * up
        out = torch.empty_like(rows)
        for e, part in _parts(sizes):
            torch.mm(middle[part], w_out[e].t(), out=out[part])
        by_token = out.index_select(0, place).view(n, k, -1)
        w = weights.to(dtype)
        scale = torch.zeros(len(source), 1, dtype=dtype)
        scale[place] = w.reshape(-1, 1)
        ctx.save_for_backward(w, place, source, scale, rows, hidden, middle, by_token, w_in, w_out)
        ctx.sizes = sizes
        return torch.bmm(w.unsqueeze(1), by_token).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        w, place, source, scale, rows, hidden, middle, by_token, w_in, w_out = ctx.saved_tensors
        n, k = w.shape
        grad = grad.to(torch.bfloat16)
        d_weights = torch.bmm(by_token, grad.unsqueeze(2)).squeeze(2)
        d_out = torch.cat([grad, grad.new_zeros(1, grad.shape[1])])[source] * scale
        d_middle = torch.empty_like(middle)
        d_w_in, d_w_out = torch.zeros_like(w_in), torch.zeros_like(w_out)
        for e, part in _parts(ctx.sizes):
            torch.mm(d_out[part], w_out[e], out=d_middle[part])
            torch.mm(d_out[part].t(), middle[part], out=d_w_out[e])
        gate, up = hidden.chunk(2, dim=-1)
        sig = torch.sigmoid(gate)
        act = gate * sig
        d_hidden = torch.cat([d_middle * up * (sig + act * (1 - sig)), d_middle * act], dim=-1)
        d_rows = torch.empty_like(rows)
        for e, part in _parts(ctx.sizes):
            torch.mm(d_hidden[part], w_in[e], out=d_rows[part])
            torch.mm(d_hidden[part].t(), rows[part], out=d_w_in[e])
        d_x = d_rows.index_select(0, place).view(n, k, -1).sum(1)
        return d_x.float(), d_weights.float(), None, d_w_in.float(), d_w_out.float()


BLOCK = 128


class _Attention(torch.autograd.Function):
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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves paired: x [B, heads, T, D], cos and sin [T, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Layer(nn.Module):
    """One block: grouped-query attention, then the experts, each behind a norm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        h, d = c.hidden_size, c.head_dim
        self.input_norm = RMSNorm(h, c.rms_norm_eps)
        self.post_norm = RMSNorm(h, c.rms_norm_eps)
        self.q = nn.Linear(h, c.num_attention_heads * d, bias=False)
        self.k = nn.Linear(h, c.num_key_value_heads * d, bias=False)
        self.v = nn.Linear(h, c.num_key_value_heads * d, bias=False)
        self.o = nn.Linear(c.num_attention_heads * d, h, bias=False)
        self.q_norm = RMSNorm(d, c.rms_norm_eps)
        self.k_norm = RMSNorm(d, c.rms_norm_eps)
        self.router = nn.Parameter(torch.empty(c.num_experts, h))
        self.gate_up = nn.Parameter(torch.empty(c.num_experts, 2 * c.moe_intermediate_size, h))
        self.down = nn.Parameter(torch.empty(c.num_experts, h, c.moe_intermediate_size))
        self.share: Tensor
        share = torch.full((c.num_experts,), 1.0 / c.num_experts)
        self.register_buffer("share", share, persistent=False)
        # Evaluation only: experts barred from the choice, and the ids chosen last, [N, K].
        self.barred: Tensor | None = None
        self.chosen: Tensor | None = None

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H], causal."""
        b, t, _ = x.shape
        d = self.c.head_dim
        q = self.q_norm(self.q(x).view(b, t, -1, d)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(b, t, -1, d)).transpose(1, 2)
        v = self.v(x).view(b, t, -1, d).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        kv = self.c.num_key_value_heads
        q = q.reshape(b * kv, -1, t, d)
        out: Tensor = _Attention.apply(q, k.reshape(b * kv, 1, t, d), v.reshape(b * kv, 1, t, d))
        out = out.view(b, -1, t, d).to(v.dtype)
        return self.o(out.transpose(1, 2).reshape(b, t, -1))

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] -> output [N, H], balance loss []."""
        c = self.c
        with torch.autocast("cpu", enabled=False):
            logits = functional.linear(x.float(), self.router)
            if self.barred is not None:
                logits = logits.masked_fill(self.barred, float("-inf"))
            p = logits.softmax(-1)
            top, ids = p.topk(c.num_experts_per_tok, dim=-1)
            weights = top / top.sum(-1, keepdim=True)
            share = torch.bincount(ids.flatten(), minlength=c.num_experts) / ids.numel()
            if self.training:
                # The share is a running mean: balance is asked for over many batches of mixed
                # text, not within each, so that experts may still specialise by domain.
                self.share.lerp_(share, 0.1)
            balance = c.num_experts * (self.share * p.mean(0)).sum()
            y: Tensor = _Experts.apply(x, weights, ids, self.gate_up, self.down)
        if not self.training:
            self.chosen = ids
        return y, balance

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, H] -> the same, balance loss []."""
        x = x + self.attention(self.input_norm(x), cos, sin)
        y, balance = self.experts(self.post_norm(x).flatten(0, 1))
        return x + y.view_as(x), balance


class Model(nn.Module):
    """Token ids [B, T] -> logits [B, T, V]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        steps = torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
        angles = torch.arange(c.max_position_embeddings)[:, None] * c.rope_theta**-steps
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights, the projections back into the stream scaled by depth."""
        small = 0.02 / math.sqrt(2 * self.c.num_hidden_layers)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                out = name.endswith(("o.weight", "down"))
                nn.init.normal_(p, std=small if out else 0.02, generator=generator)

    def hidden(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, T] -> normalised last states [B, T, H], mean balance loss []."""
        t = ids.shape[1]
        cos, sin = self.get_buffer("cos")[:t], self.get_buffer("sin")[:t]
        x = functional.embedding(ids, self.embed)
        balances = []
        for layer in self.layers:
            x, balance = layer(x, cos, sin)
            balances.append(balance)
        return self.norm(x), torch.stack(balances).mean()

    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(self.hidden(ids)[0], self.embed)

    def losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, T+1] -> mean cross-entropy [], mean balance loss []."""
        x, balance = self.hidden(ids[:, :-1])
        loss: Tensor = _Loss.apply(x.flatten(0, 1), self.embed, ids[:, 1:].flatten())
        return loss, balance


def layers_of(model: Model) -> list[Layer]:
    """The blocks, typed."""
    return [layer for layer in model.layers if isinstance(layer, Layer)]


def hugging_face_state(model: Model) -> dict[str, Tensor]:
    """The weights under their published names, one tensor an expert's matrix."""
    state = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm.weight}
    for i, layer in enumerate(layers_of(model)):
        at = f"model.layers.{i}"
        state[f"{at}.input_layernorm.weight"] = layer.input_norm.weight
        state[f"{at}.post_attention_layernorm.weight"] = layer.post_norm.weight
        for name in ("q", "k", "v", "o"):
            state[f"{at}.self_attn.{name}_proj.weight"] = getattr(layer, name).weight
        state[f"{at}.self_attn.q_norm.weight"] = layer.q_norm.weight
        state[f"{at}.self_attn.k_norm.weight"] = layer.k_norm.weight
        state[f"{at}.mlp.gate.weight"] = layer.router
        for e in range(model.c.num_experts):
            gate, up = layer.gate_up[e].chunk(2, dim=0)
            state[f"{at}.mlp.experts.{e}.gate_proj.weight"] = gate
            state[f"{at}.mlp.experts.{e}.up_proj.weight"] = up
            state[f"{at}.mlp.experts.{e}.down_proj.weight"] = layer.down[e]
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def hugging_face_config(c: Config, end: int, dtype: str) -> dict[str, Any]:
    """The `config.json` of the published layout."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **{k: v for k, v in asdict(c).items() if k != "rope_theta"},
        "rope_theta": c.rope_theta,
        "intermediate_size": c.moe_intermediate_size * c.num_experts_per_tok,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "router_aux_loss_coef": 0.02,
        "initializer_range": 0.02,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
    }


def write_json(path: Path, value: object) -> None:
    """Indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
