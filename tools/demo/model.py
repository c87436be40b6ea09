"""The demo model in plain torch: a `qwen3_moe` decoder written for fast training on a CPU.

Shapes: B sequences, T positions, N = B*T tokens, H hidden size, D head size, E experts,
K experts a token, I expert width, V vocabulary.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.demo.functions import Attention, Experts, Loss, Norm


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


class RMSNorm(nn.Module):
    """x [..., n] -> x / rms(x) * weight, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            out: Tensor = Norm.apply(x.float(), self.weight, self.eps)
        return out


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
        out: Tensor = Attention.apply(q, k.reshape(b * kv, 1, t, d), v.reshape(b * kv, 1, t, d))
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
            y: Tensor = Experts.apply(x, weights, ids, self.gate_up, self.down)
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
        loss: Tensor = Loss.apply(x.flatten(0, 1), self.embed, ids[:, 1:].flatten())
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
