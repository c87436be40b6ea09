"""Keys of Inkling: full and sliding layers with different heads, dense and sparse feed-forwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from colibri.models.config import MoEConfig
from colibri.nn.ffn import DenseFFN
from colibri.nn.moe import MoEFFN
from colibri.nn.relative import LogScaling, RelativeAttention
from colibri.nn.route import Route

SLIDING, DENSE = "hybrid_sliding", "dense"
_MOST = 1 << 16  # heads or shared experts: a damaged count must not keep the loader busy
_KINDS = {
    "layer_types": {SLIDING, "hybrid", "full_attention"},
    "mlp_layer_types": {DENSE, "sparse"},
}


@dataclass(frozen=True, kw_only=True)
class InklingConfig(MoEConfig):
    """Sliding layers have heads of their own; a list or indices say which layers slide.

    Where `dense_intermediate_size` is given, `intermediate_size` is the width of an expert.
    """

    intermediate_size: int
    moe_intermediate_size: int | None = None
    dense_intermediate_size: int | None = None
    n_shared_experts: int
    swa_num_attention_heads: int
    swa_num_key_value_heads: int
    swa_head_dim: int
    sliding_window_size: int
    d_rel: int
    rel_extent: int
    layer_types: tuple[str, ...] | None = None
    local_layer_ids: tuple[int, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    dense_mlp_idx: int | None = None
    conv_kernel_size: int = 4
    log_scaling_n_floor: int | None = None
    log_scaling_alpha: float = 0.1
    route_scale: float = 8.0
    shared_expert_sink: bool = True
    logits_mup_width_multiplier: float = 24.0
    unpadded_vocab_size: int | None = None

    unused_keys: ClassVar[frozenset[str]] = frozenset(
        {
            *("rms_norm_eps_moe_gate", "mtp_config", "num_mtp_layers"),
            *("chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids"),
        }
    )

    def check(self) -> None:
        """Sizes are positive and fit each other; each layer has known kinds."""
        super().check()
        for key in ("n_shared_experts", "swa_num_attention_heads", "swa_num_key_value_heads"):
            self.require(0 < getattr(self, key) <= _MOST, key, f"must be 1 to {_MOST:,}")
        for key in ("swa_head_dim", "sliding_window_size", "rel_extent", "log_scaling_n_floor"):
            self.require(getattr(self, key) is None or getattr(self, key) > 0, key, "must be > 0")
        self.require(0 < self.d_rel <= 64, "d_rel", "must be 1 to 64")
        self.require(0 < self.conv_kernel_size <= 16, "conv_kernel_size", "must be 1 to 16")
        self.require(self.logits_mup_width_multiplier > 0, "logits_mup_width_multiplier", "is <= 0")
        self.require(self.shared_expert_sink, "shared_expert_sink", "is not implemented, only true")
        divides = self.swa_num_attention_heads % self.swa_num_key_value_heads == 0
        self.require(divides, "swa_num_key_value_heads", "must divide swa_num_attention_heads")
        self.require(
            self.rope.attention_factor == 1, "rope_parameters", "must not scale: nothing is rotated"
        )
        self.require(0 < self.num_ids <= self.vocab_size, "unpadded_vocab_size", "is out of range")
        self.require(self.expert_width > 0, "moe_intermediate_size", "must be positive")
        for key, kinds in _KINDS.items():
            given = getattr(self, key)
            fits = given is None or (len(given) == self.num_hidden_layers and {*given} <= kinds)
            self.require(fits, key, f"must give each layer one of {sorted(kinds)}")
        self._check_older_keys()

    def _check_older_keys(self) -> None:
        """What is said in two ways is said alike."""
        layers, local, dense = (
            range(self.num_hidden_layers),
            self.local_layer_ids,
            self.dense_mlp_idx,
        )
        inside = local is None or {*local} <= {*layers}
        self.require(inside, "local_layer_ids", "names a layer that is none")
        agree = local is None or all(self.slides(index) == (index in local) for index in layers)
        self.require(agree, "local_layer_ids", "and layer_types differ: remove one of them")
        inside = dense is None or 0 <= dense <= self.num_hidden_layers
        self.require(inside, "dense_mlp_idx", "must be a number of layers")
        agree = dense is None or all(self.is_sparse(index) == (index >= dense) for index in layers)
        self.require(agree, "dense_mlp_idx", "and mlp_layer_types differ: remove one of them")
        if (width := self.dense_intermediate_size) is not None:
            self.require(width > 0, "dense_intermediate_size", "must be positive")
            agree = self.moe_intermediate_size in (None, self.intermediate_size)
            self.require(agree, "moe_intermediate_size", "and intermediate_size differ: remove one")

    @property
    def num_ids(self) -> int:
        """Ids beyond are padding."""
        return self.vocab_size if self.unpadded_vocab_size is None else self.unpadded_vocab_size

    @property
    def expert_width(self) -> int:
        """F of an expert, 0 where no key says."""
        if self.dense_intermediate_size is not None:
            return self.intermediate_size
        return self.moe_intermediate_size or 0

    def slides(self, index: int) -> bool:
        """Whether layer `index` sees a window; where no key says, all but every sixth do."""
        if self.layer_types is not None:
            return self.layer_types[index] == SLIDING
        local = self.local_layer_ids
        return (index + 1) % 6 != 0 if local is None else index in local

    def is_sparse(self, index: int) -> bool:
        """Whether layer `index` has routed experts."""
        kinds = self.mlp_layer_types
        return index >= (self.dense_mlp_idx or 0) if kinds is None else kinds[index] != DENSE

    def attention(self, index: int) -> RelativeAttention:
        """Of layer `index`; only layers that see everything scale with the position."""
        slides, floor = self.slides(index), self.log_scaling_n_floor
        scaling = None if floor is None else LogScaling(self.log_scaling_alpha, floor)
        return RelativeAttention(
            hidden_size=self.hidden_size,
            num_heads=self.swa_num_attention_heads if slides else self.num_attention_heads,
            num_kv_heads=self.swa_num_key_value_heads if slides else self.kv_heads,
            head_dim=self.swa_head_dim if slides else self.head_width,
            norm=self.norm,
            window=self.sliding_window_size if slides else None,
            rank=self.d_rel,
            extent=self.sliding_window_size if slides else self.rel_extent,
            kernel=self.conv_kernel_size,
            scaling=None if slides else scaling,
        )

    def feed_forward(self, index: int) -> DenseFFN | MoEFFN:
        """Of layer `index`."""
        if not self.is_sparse(index):
            return DenseFFN(
                hidden_size=self.hidden_size,
                intermediate_size=self.dense_intermediate_size or self.intermediate_size,
                norm=self.norm,
                learned_factor=True,
            )
        route = Route(
            normalize=True,
            scoring="sigmoid",
            choice_bias=True,
            factor=self.route_scale,
            learned_factor=True,
            num_shared=self.n_shared_experts,
        )
        return MoEFFN.from_config(self, route, intermediate_size=self.expert_width)
