"""What families share of DeepSeek's latent attention, with an indexer or without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from colibri.errors import UnsupportedModelError
from colibri.models.config import PairableConfig
from colibri.models.gguf_names import Gguf, Keys
from colibri.models.noaux import NoauxMoEConfig
from colibri.nn.mla import MultiHeadLatentAttention, SparseIndex
from colibri.nn.norm import RMSNorm
from colibri.nn.sublayer import Layer

_FULL, _SHARED = "full", "shared"
_KINDS = {"F": _FULL, "S": _SHARED}
# Names of the cache that other engines give such a layer; every layer is computed alike.
_LAYER_TYPES = frozenset({"indexed_attention", "deepseek_sparse_attention", "full_attention"})


@dataclass(frozen=True, kw_only=True)
class LatentMoEConfig(PairableConfig, NoauxMoEConfig):
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

    rotates: ClassVar[bool] = True  # whether a part of each head has a position

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """As every config; what is not said of a head's width is no mistake here."""
        return super().read({**config, "head_dim": config.get("head_dim") or 2})

    def check(self) -> None:
        """Sizes of latents and heads."""
        super().check()
        for key in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            self.require(getattr(self, key) > 0, key, "must be positive")
        rotated = self.qk_rope_head_dim
        fits = rotated > 0 if self.rotates else rotated == 0
        self.require(fits, "qk_rope_head_dim", f"must be {'positive' if self.rotates else '0'}")
        plain = self.rotates or self.rope.attention_factor == 1
        self.require(plain, "rope_parameters", "scale positions, which the model does not know")
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
        """What rope rotates, and all of it; where nothing is rotated, the whole head."""
        return self.qk_rope_head_dim if self.rotates else self.qk_nope_head_dim

    @property
    def latent_norm(self) -> RMSNorm:
        """The norm of latents: whatever rms_norm_eps says, in all but a few families."""
        return RMSNorm(1e-6)

    def attention(self, index: int) -> MultiHeadLatentAttention:
        """Of layer `index`."""
        rope = self.rope if self.rotates else None
        return MultiHeadLatentAttention.from_config(self, rope, latent_norm=self.latent_norm)


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
    layer_kinds: ClassVar[frozenset[str]] = _LAYER_TYPES

    def check(self) -> None:
        """Each layer has an indexer or one before it to follow."""
        super().check()
        for key in ("index_topk", "index_n_heads", "index_head_dim", "index_topk_freq"):
            self.require(getattr(self, key) > 0, key, "must be positive")
        fits = self.index_head_dim >= self.qk_rope_head_dim
        self.require(fits, "index_head_dim", "must be at least qk_rope_head_dim")
        kinds = self.index_kinds()
        known = len(kinds) == self.num_hidden_layers and {*kinds} <= {_FULL, _SHARED}
        keys = ("indexer_types", "index_topk_pattern")
        key = next((key for key in keys if getattr(self, key) is not None), "index_topk_freq")
        self.require(
            known and kinds[0] == _FULL, key, "must give each layer full or shared, the first full"
        )
        layers, kinds_known = set(self.layer_types or ()), self.layer_kinds
        self.require(layers <= kinds_known, "layer_types", f"may only be {sorted(kinds_known)}")
        if not self.shares_indexers and _SHARED in kinds:
            raise UnsupportedModelError(
                f"config.json: {key} has layers without an indexer, which model_type "
                f"{self.model_type!r} does not know"
            )

    @property
    def index_pool(self) -> int:
        """Positions that are selected together."""
        return 1

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
            top_k=self.index_topk // self.index_pool,
            pairing="pair" if self.indexer_rope_interleave else "half",
            shared=kinds[min(index, self.num_hidden_layers)] == _SHARED,
            pool=self.index_pool,
        )
        return MultiHeadLatentAttention.from_config(
            self,
            self.rope if self.rotates else None,
            index=selection,
            latent_norm=self.latent_norm,
        )


def latent_config(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of heads as GGUF files say them; those of older files count the heads themselves."""
    width = keys.get("attention.key_length_mla") or keys.get("attention.key_length")
    value = keys.get("attention.value_length_mla") or keys.get("attention.value_length")
    rotated = keys.get("rope.dimension_count")
    return {
        "num_key_value_heads": config.get("num_attention_heads"),
        "qk_nope_head_dim": width - rotated if width and rotated else None,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
    }


def latent_gguf(when: Callable[[Keys], bool], **adapted: Any) -> Gguf:
    """DeepSeek's architecture in GGUF files; `adapted` are further config values."""
    return Gguf(
        architecture="deepseek2",
        when=when,
        keys={"attention.key_length": "", "attention.head_count_kv": ""},
        adapt=lambda keys, config: {**latent_config(keys, config), **adapted},
    )


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
