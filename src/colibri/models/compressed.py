"""Keys of attention over a window and compressed entries, in either spelling; names of tensors."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from colibri.kernels.api import KV_BLOCK
from colibri.kv import fills_blocks
from colibri.models.config import SLIDING, BaseConfig
from colibri.nn.rope import Rope
from colibri.nn.shared_key import CompressedAttention, Compression, EntryIndex

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_SPARSE_RATIO = 4  # of `compress_ratios`: such layers select entries; larger ones see all
# (theirs, ours) parts of names, as a checkpoint is read from top to bottom, written from bottom to
# top; those that do not begin with a dot begin the name.
_NAMES = (
    ("hc_head_", "model.hc_head.hc_"),
    ("embed.", "model.embed_tokens."),
    ("head.", "lm_head."),
    ("norm.", "model.norm."),
    ("layers.", "model.layers."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    (".compressor.wkv.", ".compressor.kv_proj."),
    (".compressor.wgate.", ".compressor.gate_proj."),
    (".compressor.norm.", ".compressor.kv_norm."),
    (".compressor.ape", ".compressor.position_bias"),
    (".attn.", ".self_attn."),
    (".self_attn.indexer.compressor.", ".self_attn.compressor.indexer."),
    (".self_attn.indexer.wq_b.", ".self_attn.compressor.indexer.q_b_proj."),
    (".self_attn.indexer.weights_proj.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (".self_attn.attn_sink", ".self_attn.sinks"),
    (".self_attn.wq_a.", ".self_attn.q_a_proj."),
    (".self_attn.wq_b.", ".self_attn.q_b_proj."),
    (".self_attn.q_norm.", ".self_attn.q_a_norm."),
    (".self_attn.wkv.", ".self_attn.kv_proj."),
    (".self_attn.wo_a.", ".self_attn.o_a_proj."),
    (".self_attn.wo_b.", ".self_attn.o_b_proj."),
    (".ffn.", ".mlp."),
    (".mlp.gate.bias", ".mlp.gate.e_score_correction_bias"),
    (".mlp.shared_experts.w1.", ".mlp.shared_expert.gate_proj."),
    (".mlp.shared_experts.w2.", ".mlp.shared_expert.down_proj."),
    (".mlp.shared_experts.w3.", ".mlp.shared_expert.up_proj."),
)
PUBLISHED = tuple(
    (("" if theirs.startswith(".") else "^") + re.escape(theirs), ours) for theirs, ours in _NAMES
)
AS_PUBLISHED = tuple((ours, theirs) for theirs, ours in reversed(_NAMES))
_RATES: Mapping[str, int] = {_SPARSE: 4, _HEAVY: 128}
_ROPES = ("main", "compress")


@dataclass(frozen=True, kw_only=True)
class CompressedConfig(BaseConfig):
    """`layer_types` and `compress_rates`, or a list of `compress_ratios`, say what layers see.

    Two ropes: `main` of layers that see a window alone, `compress` of the others. In the published
    spelling the latter is `rope_scaling` at `compress_rope_theta`, whose YaRN scales no attention.
    """

    q_lora_rank: int
    sliding_window: int = 128
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int = 512
    qk_rope_head_dim: int | None = None
    partial_rotary_factor: float | None = None
    compress_rope_theta: float = 160000.0
    compress_ratios: tuple[int, ...] | None = None
    compress_rates: Mapping[str, Any] | None = None
    layer_types: tuple[str, ...] | None = None

    partial_rotary: ClassVar[bool] = True

    def check(self) -> None:
        """Sizes are positive and fit one another; each layer has a known kind."""
        super().check()
        for key in (
            *("q_lora_rank", "sliding_window", "o_groups", "o_lora_rank"),
            *("index_n_heads", "index_head_dim", "index_topk"),
        ):
            self.require(getattr(self, key) > 0, key, "must be positive")
        self.require(self.kv_heads == 1, "num_key_value_heads", "must be 1")
        whole = self.num_attention_heads % self.o_groups == 0
        self.require(whole, "o_groups", "must divide num_attention_heads")
        self.require(self.o_lora_rank % 8 == 0, "o_lora_rank", "must be a multiple of 8")
        width, rotated = min(self.head_width, self.index_head_dim), self.rotary_width
        key = "rope_parameters" if self.qk_rope_head_dim is None else "qk_rope_head_dim"
        fits = 0 < rotated <= width and rotated % 2 == 0
        self.require(fits, key, f"must rotate an even number of dims, at most {width}")
        key = "compress_ratios" if self.layer_types is None else "layer_types"
        enough = len(self.kinds) >= self.num_hidden_layers  # drafting layers have entries too
        self.require(enough, key, f"must have {self.num_hidden_layers} entries")
        for stride, _ in self.kinds:
            self.require(
                stride == 0 or fills_blocks(stride),
                key if self.layer_types is None else "compress_rates",
                f"gives {stride}, which neither divides {KV_BLOCK} nor is a multiple of it",
            )

    @cached_property
    def rotary_width(self) -> int:
        """Dims of a head that are rotated, an eighth where no key says; all that say must agree."""
        parts = self._two_ropes or (self.rope_parameters,)
        given = [self.partial_rotary_factor, *(x.get("partial_rotary_factor") for x in parts)]
        shares = [share for share in given if share is not None]
        fits = all(type(share) in (int, float) and 0 <= share <= 1 for share in shares)
        self.require(fits, "rope_parameters", "must have a partial_rotary_factor of 0 to 1")
        widths = {int(self.head_width * share) for share in shares}
        if self.qk_rope_head_dim is not None:
            widths.add(self.qk_rope_head_dim)
        rule = f"and partial_rotary_factor rotate {sorted(widths)} dims: they mean the same"
        self.require(len(widths) < 2, "qk_rope_head_dim", rule)
        return widths.pop() if widths else self.head_width // 8

    @cached_property
    def kinds(self) -> tuple[tuple[int, bool], ...]:
        """For each layer the positions of an entry (0: a window alone), and whether it selects."""
        rates = {**_RATES, **(self.compress_rates or {})}
        given = all(type(rate) is int and rate > 1 for rate in rates.values())
        self.require(given, "compress_rates", "must be whole numbers above 1")
        self.require({*rates} <= {*_RATES}, "compress_rates", f"may only be of {[*_RATES]}")
        if self.layer_types is None and self.compress_ratios:
            found = self._by_ratio
            apart = {(rates[_SPARSE], True), (rates[_HEAVY], False), (0, False)}
            agree = self.compress_rates is None or {*found} <= apart
            self.require(agree, "compress_rates", "and compress_ratios differ: remove one of them")
            return found
        kinds = self._usual_kinds() if self.layer_types is None else self.layer_types
        unknown = {*kinds} - {SLIDING, *_RATES}
        self.require(not unknown, "layer_types", f"may only be {[SLIDING, *_RATES]}")
        found = tuple((rates.get(kind, 0), kind == _SPARSE) for kind in kinds)
        agree = not self.compress_ratios or all(map(operator.eq, found, self._by_ratio))
        self.require(agree, "compress_ratios", "and layer_types differ: remove one of them")
        return found

    @property
    def _by_ratio(self) -> tuple[tuple[int, bool], ...]:
        """As `kinds`, from `compress_ratios`."""
        ratios = self.compress_ratios or ()
        self.require(all(m >= 0 for m in ratios), "compress_ratios", "must not be negative")
        return tuple((m if m > 1 else 0, m == _SPARSE_RATIO) for m in ratios)

    def _usual_kinds(self) -> tuple[str, ...]:
        """Two layers see all entries, then every second one selects."""
        layers = range(self.num_hidden_layers)
        return tuple(_SPARSE if index > 2 and index % 2 else _HEAVY for index in layers)

    @cached_property
    def _two_ropes(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """The parameters of both ropes, where they are given apart."""
        given = self.rope_parameters
        if not given.keys() & {*_ROPES}:
            return None
        whole = given.keys() == {*_ROPES} and all(isinstance(x, Mapping) for x in given.values())
        self.require(whole, "rope_parameters", f"must hold {' and '.join(_ROPES)}, nothing else")
        return given[_ROPES[0]], given[_ROPES[1]]

    @cached_property
    def ropes(self) -> tuple[Rope, Rope]:
        """That of layers that see a window alone, and that of the others."""
        if self._two_ropes is not None:
            main, compress = self._two_ropes
            return self._rope(main), self._rope(compress)
        given = dict(self.rope_parameters)
        theta = {"rope_theta": given.get("rope_theta", self.default_rope_theta)}
        scaled = {"attention_factor": 1.0} if given.get("rope_type") == "yarn" else {}
        compress = {**scaled, **given, "rope_theta": self.compress_rope_theta}
        return self._rope(theta), self._rope(compress)

    def _rope(self, parameters: Mapping[str, Any]) -> Rope:
        whole = {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}
        return Rope.from_parameters(
            whole,
            head_dim=self.rotary_width,
            max_position_embeddings=self.max_position_embeddings,
            pairing="pair",
        )

    def attention(self, index: int) -> CompressedAttention:
        """Of layer `index`; where entries are selected, they overlap."""
        stride, selects = self.kinds[index]
        main, compress = self.ropes
        if not stride:
            return CompressedAttention.from_config(self, main, None)
        entries = EntryIndex(
            num_heads=self.index_n_heads, head_dim=self.index_head_dim, top_k=self.index_topk
        )
        compression = Compression(
            stride=stride, overlap=selects, index=entries if selects else None
        )
        return CompressedAttention.from_config(self, compress, compression)


TINY: Mapping[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "sliding_window": 8,
    "layer_types": [SLIDING, _SPARSE, _HEAVY],
    "compress_rates": {_SPARSE: 4, _HEAVY: 8},
    "compress_rope_theta": 40000.0,
}
