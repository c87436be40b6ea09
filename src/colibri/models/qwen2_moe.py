"""Qwen2-MoE: biased q, k, v; a gated shared expert; dense layers by stride and by list."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.models.config import StridedMoEConfig
from colibri.models.family import Family
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.ffn import DenseFFN
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route
from colibri.nn.sublayer import Layer

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Config(StridedMoEConfig):
    """`layer_types` says which layers slide; without it, even ones below `max_window_layers`."""

    shared_expert_intermediate_size: int
    qkv_bias: bool = True
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    def check(self) -> None:
        """A window that is used is given; each layer has a known kind."""
        super().check()
        given = not self.use_sliding_window or (self.sliding_window or 0) > 0
        self.require(given, "sliding_window", "must be positive where use_sliding_window is true")
        kinds = (_FULL,) * self.num_hidden_layers if self.layer_types is None else self.layer_types
        known = len(kinds) == self.num_hidden_layers and {*kinds} <= {_FULL, _SLIDING}
        self.require(known, "layer_types", f"must give each layer {_FULL!r} or {_SLIDING!r}")
        used = self.use_sliding_window or _SLIDING not in kinds
        self.require(used, "layer_types", "has sliding layers, but use_sliding_window is false")

    def window(self, index: int) -> int | None:
        """The window of layer `index`, None where it sees everything."""
        if not self.use_sliding_window:
            return None
        if self.layer_types is not None:
            slides = self.layer_types[index] == _SLIDING
        else:
            slides = index % 2 == 0 and index < self.max_window_layers
        return self.sliding_window if slides else None


def layer(cfg: Config, index: int) -> Layer:
    """Attention is alike everywhere; the feed-forward is sparse or dense."""
    attention = GroupedQueryAttention.from_config(
        cfg, qkv_bias=cfg.qkv_bias, window=cfg.window(index)
    )
    if not cfg.is_sparse(index):
        return Layer(attention, DenseFFN.from_config(cfg))
    moe = MoEFFN.from_config(
        cfg,
        Route(normalize=cfg.norm_topk_prob),
        intermediate_size=cfg.moe_intermediate_size,
        shared_intermediate_size=cfg.shared_expert_intermediate_size,
        shared_gate=True,
    )
    return Layer(attention, moe)


FAMILY = Family(
    model_type="qwen2_moe",
    config=Config,
    layer=layer,
    dialect="qwen",
    tiny={
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 112,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
)
