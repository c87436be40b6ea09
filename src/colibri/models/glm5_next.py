"""GLM-5.3-Flash: four streams, Kimi delta attention, latent attention to selected pools of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from colibri.kv import fills_blocks
from colibri.models.family import Family
from colibri.models.kimi_delta import KimiDeltaConfig
from colibri.models.latent import TINY, SparseLatentMoEConfig
from colibri.models.noaux import SHARED_EXPERT_AS_PUBLISHED, SHARED_EXPERTS
from colibri.models.streams import STREAMS, STREAMS_AS_PUBLISHED, StreamsConfig, mean_trunk
from colibri.nn.hyper import hyper_connected
from colibri.nn.norm import RMSNorm
from colibri.nn.sublayer import Layer

_LINEAR, _INDEXED = "linear_attention", "indexed_attention"


@dataclass(frozen=True, kw_only=True)
class Config(StreamsConfig, KimiDeltaConfig, SparseLatentMoEConfig):
    """Order is known from the recurrence alone; latents have the norm of everything else."""

    first_k_dense_replace: int = 3
    index_kpool: int = 16
    index_kpool_always_select_tail: bool = True
    linear_lower_bound: float | None = -5.0

    rotates: ClassVar[bool] = False
    shares_indexers: ClassVar[bool] = True
    attention_kinds: ClassVar[frozenset[str]] = frozenset({_INDEXED, "full_attention"})
    layer_kinds: ClassVar[frozenset[str]] = attention_kinds | {_LINEAR}

    def check(self) -> None:
        """Pools are whole, and what is not yet one is seen."""
        super().check()
        pool = self.index_kpool
        whole = pool > 1 and self.index_topk % pool == 0 and fills_blocks(pool)
        self.require(whole, "index_kpool", "must be above 1, divide index_topk, and fill 64 evenly")
        tail = self.index_kpool_always_select_tail
        self.require(tail, "index_kpool_always_select_tail", "must be true")
        self.require(self.q_lora_rank is not None, "q_lora_rank", "must be given")

    @property
    def index_pool(self) -> int:
        """Positions that are selected together."""
        return self.index_kpool

    @property
    def latent_norm(self) -> RMSNorm:
        """As everywhere in the model."""
        return self.norm

    def is_linear(self, index: int) -> bool:
        """Unless it is said, three of four layers are."""
        return index % 4 != 3 if self.layer_types is None else super().is_linear(index)


def layer(cfg: Config, index: int) -> Layer:
    """Both kinds of attention stand before the same feed-forwards."""
    linear = cfg.is_linear(index)
    mixer = cfg.delta_attention((cfg.linear_num_heads,)) if linear else cfg.attention(index)
    return hyper_connected(Layer(mixer, cfg.feed_forward(index)), cfg.streams)


FAMILY = Family(
    model_type="glm5_next",
    aliases=("glm5_next_text",),
    config=Config,
    layer=layer,
    trunk=mean_trunk,
    rename=((r"^model\.language_model\.", "model."), *STREAMS, *SHARED_EXPERTS),
    unrename=(
        *STREAMS_AS_PUBLISHED,
        *SHARED_EXPERT_AS_PUBLISHED,
        ("model.", "model.language_model."),
    ),
    ignore=(r"model\.visual\.",),
    dialect="key-value-tags",
    tiny={
        **TINY,
        **{"qk_rope_head_dim": 0, "linear_num_heads": 4, "linear_head_dim": 16},
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "swiglu_limit": 1.5},
        **{"index_topk": 8, "index_kpool": 2, "index_n_heads": 16, "index_head_dim": 16},
        **{"mlp_layer_types": ["dense", "sparse", "sparse"], "pad_token_id": None},
        "layer_types": [_LINEAR, _INDEXED, _INDEXED],
        "indexer_types": ["full", "full", "shared"],
    },
)
