"""Keys of hybrids between gated streams, with block-sparse attention and n-gram embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from colibri.errors import UnsupportedModelError
from colibri.kv import fills_blocks
from colibri.models.config import FULL, MoEConfig
from colibri.models.hybrid import HybridConfig
from colibri.nn.block_sparse import BlockIndex, BlockSparseAttention
from colibri.nn.delta import GatedDeltaNet
from colibri.nn.gated_streams import GatedStreams
from colibri.nn.moe import MoEFFN
from colibri.nn.ngram import NGramEmbedding, NGramHash
from colibri.nn.route import Route

_INDEXED = "indexed_attention"
_MOST_STREAMS, _MOST_TAPS, _MOST_WIDTH, _MOST_ROWS = 16, 16, 1 << 16, 1 << 40
_HEAD = "model.hyper_connection_mixer."


@dataclass(frozen=True, kw_only=True)
class StreamedConfig(HybridConfig, MoEConfig):
    """Every layer is sparse, has a shared expert, and stands between streams."""

    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    hc_count: int = 4
    hc_lowrank: int = 320
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    indexer_kv_heads: int = 1
    ple_layer_ids: tuple[int, ...] = ()
    ple_embed_dim: int | None = None
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    split_ngram_parts: int = 512
    seed: int = 1234
    norm_topk_prob: bool = True
    output_gate_type: str | None = None
    attn_output_gate: bool = True
    mamba_ssm_dtype: str = "float32"
    mtp_num_hidden_layers: int = 0

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Layers with an indexer are called by either name."""
        kinds = config.get("layer_types")
        if isinstance(kinds, list):
            config = {**config, "layer_types": [FULL if k == _INDEXED else k for k in kinds]}
        return super().read(config)

    def check(self) -> None:
        """Sizes are positive, not absurd, and fit each other."""
        super().check()
        for key, most in (
            *(("hc_count", _MOST_STREAMS), ("hc_lowrank", _MOST_WIDTH)),
            *(("indexer_n_heads", 128), ("indexer_head_dim", 256), ("indexer_budget", 1 << 24)),
            *(("indexer_kv_heads", 1), ("indexer_compress_ratio", 1 << 16)),
            *(("ple_conv_kernel_size", _MOST_TAPS), ("ngram_size", 8), ("heads_per_ngram", 256)),
            *(("ngram_vocab_size_base", 1 << 32), ("make_ngram_vocab_size_divisible_by", 1 << 32)),
        ):
            self.require(0 < getattr(self, key) <= most, key, f"must be 1 to {most:,}")
        ratio, wide = self.indexer_compress_ratio, self.rope.rotary_dim <= self.indexer_head_dim
        self.require(
            fills_blocks(ratio), "indexer_compress_ratio", "must divide 64, or be a multiple"
        )
        self.require(
            self.indexer_budget % ratio == 0, "indexer_budget", f"is no multiple of {ratio}"
        )
        self.require(wide, "indexer_head_dim", f"is below the {self.rope.rotary_dim} rotated dims")
        self.require(self.attn_output_gate, "attn_output_gate", "must be true")
        self.require(self.ngram_size >= 2, "ngram_size", "must be at least 2")
        if self.gate not in ("silu", "sigmoid"):
            raise UnsupportedModelError(
                f"config.json: output_gate_type = {self.gate!r} is not implemented; 'silu' and "
                "'sigmoid' are"
            )
        layers = {*range(1, self.num_hidden_layers + 1)}
        self.require({*self.ple_layer_ids} <= layers, "ple_layer_ids", "names a layer that is none")
        heads = (self.ngram_size - 1) * self.heads_per_ngram
        divides = self.embed_dim > 0 and self.embed_dim % heads == 0
        self.require(divides, "ple_embed_dim", f"must be a positive multiple of the {heads} heads")
        ends = 0 <= self.end < self.vocab_size or not self.ple_layer_ids
        self.require(ends, "eos_token_id", "must be a token, since n-grams end there")

    @property
    def rotary_share(self) -> float:
        """All of a head."""
        return 1.0

    @property
    def gate(self) -> str:
        """What multiplies the output of a delta net."""
        return self.output_gate_type or self.hidden_act

    @property
    def embed_dim(self) -> int:
        """Width of a token's n-gram embedding."""
        return self.hidden_size if self.ple_embed_dim is None else self.ple_embed_dim

    @property
    def end(self) -> int:
        """The token at which n-grams end, -1 where there is none."""
        ids = self.eos_token_id
        return ids if isinstance(ids, int) else ids[0] if ids else -1

    @property
    def streams(self) -> GatedStreams:
        """The streams of the model."""
        return GatedStreams(
            count=self.hc_count,
            hidden_size=self.hidden_size,
            head=_HEAD,
            rank=self.hc_lowrank,
            norm=self.norm,
        )

    def embedding(self, index: int) -> NGramEmbedding | None:
        """The n-gram embedding that layer `index` begins with, where it does."""
        layers = sorted({*self.ple_layer_ids})
        if index + 1 not in layers:
            return None
        hashed = NGramHash(
            vocab_size=self.vocab_size,
            order=self.ngram_size,
            heads=self.heads_per_ngram,
            first_size=self.ngram_vocab_size_base,
            divisor=self.make_ngram_vocab_size_divisible_by,
            layer=layers.index(index + 1),
            seed=self.seed,
            end=self.end,
        )
        return NGramEmbedding(
            hidden_size=self.hidden_size,
            num_streams=self.hc_count,
            width=self.embed_dim,
            hash=hashed,
            kernel=self.ple_conv_kernel_size,
            norm=self.norm,
        )

    def attention(self, index: int) -> BlockSparseAttention | GatedDeltaNet:
        """The first half of layer `index`, without a norm of its own."""
        if self.is_linear(index):
            return GatedDeltaNet(
                hidden_size=self.hidden_size,
                num_key_heads=self.linear_num_key_heads,
                num_heads=self.linear_num_value_heads,
                key_dim=self.linear_key_head_dim,
                value_dim=self.linear_value_head_dim,
                kernel=self.linear_conv_kernel_dim,
                norm=self.norm,
                input_norm=False,
                gate=cast(Literal["silu", "sigmoid"], self.gate),
            )
        return BlockSparseAttention(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_width,
            norm=self.norm,
            rope=self.rope,
            index=BlockIndex(
                num_heads=self.indexer_n_heads,
                head_dim=self.indexer_head_dim,
                budget=self.indexer_budget,
                ratio=self.indexer_compress_ratio,
            ),
            bias=self.attention_bias,
        )

    def experts(self) -> MoEFFN:
        """The second half of every layer, without a norm of its own."""
        return MoEFFN.from_config(
            self,
            Route(normalize=self.norm_topk_prob),
            intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.shared_expert_intermediate_size,
            shared_gate=True,
            input_norm=False,
        )
