"""MiniMax-M2: q and k normed over the whole projection, rotated in part, sigmoid scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from colibri.models.config import MoEConfig
from colibri.models.family import Family
from colibri.models.gguf_names import EXPERT_WIDTHS, Gguf
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route
from colibri.nn.sublayer import Layer


@dataclass(frozen=True, kw_only=True)
class Config(MoEConfig):
    """`rotary_dim` and `partial_rotary_factor` say the same; `intermediate_size` is an expert's."""

    intermediate_size: int
    rotary_dim: int | None = None
    use_qk_norm: bool = True
    qk_norm_type: str = "per_layer"
    scoring_func: str = "sigmoid"
    use_routing_bias: bool = True
    shared_intermediate_size: int = 0

    default_rope_theta: ClassVar[float] = 5e6
    partial_rotary: ClassVar[bool] = True

    def check(self) -> None:
        """Switches that no published checkpoint turns are not implemented."""
        super().check()
        self.require(self.use_qk_norm, "use_qk_norm", "is not implemented, only true is")
        self.require(self.qk_norm_type == "per_layer", "qk_norm_type", "must be 'per_layer'")
        self.require(self.scoring_func == "sigmoid", "scoring_func", "must be 'sigmoid'")
        self.require(self.use_routing_bias, "use_routing_bias", "is not implemented, only true is")
        self.require(self.shared_intermediate_size == 0, "shared_intermediate_size", "must be 0")
        given = self.rotary_dim is not None or "partial_rotary_factor" in self.rope_parameters
        self.require(given, "rotary_dim", "is missing, and so is partial_rotary_factor")
        agrees = self.rotary_dim in (None, self.rope.rotary_dim)
        self.require(agrees, "rotary_dim", f"contradicts the rope keys' {self.rope.rotary_dim}")

    @property
    def rotary_share(self) -> float:
        """`rotary_dim` of each head."""
        return (self.rotary_dim or 0) / self.head_width


def layer(cfg: Config, index: int) -> Layer:
    """All layers are alike."""
    route = Route(normalize=True, scoring="sigmoid", choice_bias=True)
    return Layer(
        GroupedQueryAttention.from_config(cfg, qk_norm="projection"),
        MoEFFN.from_config(cfg, route, intermediate_size=cfg.intermediate_size),
    )


FAMILY = Family(
    model_type="minimax_m2",
    config=Config,
    layer=layer,
    rename=(
        (r"\.block_sparse_moe\.e_score", ".mlp.gate.e_score"),
        (r"\.block_sparse_moe\.", ".mlp."),
    ),
    spelling="w1w3w2",
    unrename=(
        (".mlp.gate.e_score", ".block_sparse_moe.e_score"),
        (".mlp.", ".block_sparse_moe."),
    ),
    gguf=(Gguf(architecture="minimax-m2", keys=EXPERT_WIDTHS),),
    dialect="invoke-tags",
    tiny={
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 32,
        "head_dim": 32,
        "rotary_dim": 16,
        "partial_rotary_factor": 0.5,
    },
)
