"""Mixtral: an optional window on every layer; the chosen weights are always renormalised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from colibri.models.config import MoEConfig, PairableConfig
from colibri.models.family import Family
from colibri.models.gguf_names import Gguf, has_experts
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(PairableConfig, MoEConfig):
    """`intermediate_size` is the width of one expert."""

    intermediate_size: int
    sliding_window: int | None = None

    default_rope_theta: ClassVar[float] = 1e6

    def check(self) -> None:
        """A window holds at least the token itself."""
        super().check()
        given = self.sliding_window is None or self.sliding_window > 0
        self.require(given, "sliding_window", "must be positive or null")


def layer(cfg: Config, index: int) -> Layer:
    """All layers are alike."""
    attention = GroupedQueryAttention.from_config(cfg, window=cfg.sliding_window)
    moe = MoEFFN.from_config(
        cfg,
        Route(normalize=True),
        intermediate_size=cfg.intermediate_size,
    )
    return Layer(attention, moe)


FAMILY = Family(
    model_type="mixtral",
    config=Config,
    layer=layer,
    rename=((r"\.block_sparse_moe\.", ".mlp."),),
    spelling="w1w3w2",
    unrename=((".mlp.", ".block_sparse_moe."),),
    gguf=(Gguf(architecture="llama", when=has_experts, pairs=True),),
    tiny={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "sliding_window": 16,
    },
)
