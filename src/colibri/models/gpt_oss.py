"""gpt-oss: learned sinks, every other layer in a window, biases everywhere, clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from colibri.kernels.api import Swiglu
from colibri.models.config import FULL, SLIDING, MoEConfig
from colibri.models.family import Family
from colibri.models.gguf_names import EXPERT_WIDTHS, Gguf
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.moe import MoEFFN
from colibri.nn.route import Route
from colibri.nn.sublayer import Layer

_RAMP = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_ROPE: Mapping[str, Any] = {**_RAMP, "original_max_position_embeddings": 4096}


@dataclass(frozen=True, kw_only=True)
class Config(MoEConfig):
    """Layers slide by `layer_types`, or the even ones do; a rope that is not named is YaRN."""

    intermediate_size: int
    sliding_window: int = 128
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = True
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    default_rope_theta: ClassVar[float] = 150000.0
    default_rope: ClassVar[Mapping[str, Any]] = {**_ROPE, "factor": 32.0}

    def check(self) -> None:
        """Windows and clamps are positive; each layer has a known kind."""
        super().check()
        for key in ("sliding_window", "swiglu_limit", "swiglu_alpha"):
            self.require(getattr(self, key) > 0, key, "must be positive")
        kinds = (FULL,) * self.num_hidden_layers if self.layer_types is None else self.layer_types
        known = len(kinds) == self.num_hidden_layers and {*kinds} <= {FULL, SLIDING}
        self.require(known, "layer_types", f"must give each layer {FULL!r} or {SLIDING!r}")

    def window(self, index: int) -> int | None:
        """The window of layer `index`, None where it sees everything."""
        slides = index % 2 == 0 if self.layer_types is None else self.layer_types[index] == SLIDING
        return self.sliding_window if slides else None


def layer(cfg: Config, index: int) -> Layer:
    """Layers differ in their window alone."""
    attention = GroupedQueryAttention.from_config(
        cfg,
        qkv_bias=cfg.attention_bias,
        o_bias=cfg.attention_bias,
        window=cfg.window(index),
        sinks=True,
    )
    moe = MoEFFN.from_config(
        cfg,
        Route(normalize=True, linear_bias=True),
        intermediate_size=cfg.intermediate_size,
        swiglu=Swiglu(limit=cfg.swiglu_limit, alpha=cfg.swiglu_alpha, offset=1.0),
        transposed=True,
        interleaved=True,
        biased=True,
    )
    return Layer(attention, moe)


FAMILY = Family(
    model_type="gpt_oss",
    config=Config,
    layer=layer,
    rename=((r"\.mlp\.router\.", ".mlp.gate."),),
    spelling="fused",
    unrename=((".mlp.gate.", ".mlp.router."),),
    gguf=(Gguf(architecture="gpt-oss", keys=EXPERT_WIDTHS, yarn={"truncate": False}),),
    dialect="harmony",
    tiny={
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "intermediate_size": 32,
        "head_dim": 32,
        "sliding_window": 8,
        "swiglu_limit": 1.5,
        "rope_scaling": {**_ROPE, "factor": 8.0, "original_max_position_embeddings": 32},
    },
)
