"""What families share of DeepSeek's latent attention, with an indexer or without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from colibri.errors import UnsupportedModelError
from colibri.models.noaux import NoauxMoEConfig
from colibri.nn.mla import MultiHeadLatentAttention, SparseIndex
from colibri.nn.sublayer import Layer

_FULL, _SHARED = "full", "shared"
_KINDS = {"F": _FULL, "S": _SHARED}
# Names of the cache that other engines give such a layer; every layer is computed alike.
_LAYER_TYPES = {"indexed_attention", "deepseek_sparse_attention", "full_attention"}


@dataclass(frozen=True, kw_only=True)
class LatentMoEConfig(NoauxMoEConfig):
    """`head_dim` says nothing here: heads of q and k are `qk_nope_head_dim + qk_rope_head_dim`."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    qk_head_dim: int | None = None
    attention_bias: bool = False
    rope_interleave: bool = True
    moe_router_dtype: str = "float32"

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """As every config; what is not said of a head's width is no mistake here."""
        given = config.get("head_dim")
        return super().read({**config, "head_dim": 2 if given is None else given})

    def check(self) -> None:
        """Sizes of latents and heads."""
        super().check()
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            self.require(getattr(self, key) > 0, key, "must be positive")
        self.require(
            self.q_lora_rank is None or self.q_lora_rank > 0,
            "q_lora_rank",
            "must be positive or null",
        )
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.require(self.qk_head_dim in (None, width), "qk_head_dim", f"must be {width}")
        self.require(self.moe_router_dtype == "float32", "moe_router_dtype", "must be float32")

    @property
    def head_width(self) -> int:
        """What rope rotates, and all of it."""
        return self.qk_rope_head_dim

    @property
    def rope_pairing(self) -> Literal["half", "pair"]:
        """`rope_interleave` pairs neighbours."""
        return "pair" if self.rope_interleave else "half"

    def attention(self, index: int) -> MultiHeadLatentAttention:
        """Of layer `index`."""
        return MultiHeadLatentAttention.from_config(self, self.rope)


@dataclass(frozen=True, kw_only=True)
class SparseLatentMoEConfig(LatentMoEConfig):
    """Keys of the indexer; a layer without one of its own takes the selection of the one before.

    Which layers have one: `indexer_types`; else `index_topk_pattern`; else every
    `index_topk_freq`-th layer from `index_skip_topk_offset - 1` on, and all before.
    """

    index_topk: int = 2048
    index_n_heads: int
    index_head_dim: int
    indexer_types: tuple[str, ...] | None = None
    index_topk_pattern: str | tuple[str, ...] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2
    indexer_rope_interleave: bool = False
    layer_types: tuple[str, ...] | None = None

    shares_indexers: ClassVar[bool] = False

    def check(self) -> None:
        """Each layer has an indexer or one before it to follow."""
        super().check()
        for key in ("index_topk", "index_n_heads", "index_head_dim", "index_topk_freq"):
            self.require(getattr(self, key) > 0, key, "must be positive")
        fits = self.index_head_dim >= self.qk_rope_head_dim
        self.require(fits, "index_head_dim", "must be at least qk_rope_head_dim")
        kinds = self.index_kinds()
        known = len(kinds) == self.num_hidden_layers and {*kinds} <= {_FULL, _SHARED}
        key = "index_topk_pattern" if self.indexer_types is None else "indexer_types"
        self.require(
            known and kinds[0] == _FULL, key, "must give each layer full or shared, the first full"
        )
        layers = set(self.layer_types or ())
        self.require(layers <= _LAYER_TYPES, "layer_types", f"may only be {sorted(_LAYER_TYPES)}")
        if not self.shares_indexers and _SHARED in kinds:
            raise UnsupportedModelError(
                f"config.json: {key} has layers without an indexer, which model_type "
                f"{self.model_type!r} does not know"
            )

    def index_kinds(self) -> tuple[str, ...]:
        """`full` or `shared` for each layer."""
        if self.indexer_types is not None:
            return self.indexer_types
        if self.index_topk_pattern is not None:
            return tuple(_KINDS.get(kind, kind) for kind in self.index_topk_pattern)
        first, every = self.index_skip_topk_offset - 1, self.index_topk_freq
        return tuple(
            _SHARED if max(index - first, 0) % every else _FULL
            for index in range(self.num_hidden_layers)
        )

    def attention(self, index: int) -> MultiHeadLatentAttention:
        """Of layer `index`; what drafts behind the last has an indexer of its own."""
        kinds = (*self.index_kinds(), _FULL)
        selection = SparseIndex(
            num_heads=self.index_n_heads,
            head_dim=self.index_head_dim,
            top_k=self.index_topk,
            pairing="pair" if self.indexer_rope_interleave else "half",
            shared=kinds[min(index, self.num_hidden_layers)] == _SHARED,
        )
        return MultiHeadLatentAttention.from_config(self, self.rope, index=selection)


def latent_layer(cfg: LatentMoEConfig, index: int) -> Layer:
    """Latent attention, then experts, or a dense network in the first layers."""
    return Layer(cfg.attention(index), cfg.feed_forward(index))


TINY: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "intermediate_size": 112,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
