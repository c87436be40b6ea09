"""Keys of models whose layers are gated delta nets but for every so-manieth, which has attention.

Qwen3-Next began it; its successors differ in how tensors are stored and in their feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from colibri.models.config import BaseConfig
from colibri.nn.attention import GroupedQueryAttention
from colibri.nn.delta import GatedDeltaNet

_FULL, _LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class HybridConfig(BaseConfig):
    """`layer_types` says which layers are linear; without it, all but every interval's last."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: int = 4
    attention_bias: bool = False

    partial_rotary: ClassVar[bool] = True
    centred_norms: ClassVar[bool] = True

    def check(self) -> None:
        """Sizes are positive and divide; each layer has a known kind."""
        super().check()
        for key in (
            *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
            *("linear_value_head_dim", "linear_conv_kernel_dim", "full_attention_interval"),
        ):
            self.require(0 < getattr(self, key) <= 1 << 16, key, "must be 1 to 65,536")
        self.require(
            self.linear_num_value_heads % self.linear_num_key_heads == 0,
            "linear_num_value_heads",
            "must be a multiple of linear_num_key_heads",
        )
        self.require(self.linear_key_head_dim <= 1024, "linear_key_head_dim", "is above 1,024")
        self.require(self.linear_conv_kernel_dim <= 16, "linear_conv_kernel_dim", "is above 16")
        kinds = self.layer_types
        known = kinds is None or (
            len(kinds) == self.num_hidden_layers and {*kinds} <= {_FULL, _LINEAR}
        )
        self.require(known, "layer_types", f"must give each layer {_FULL!r} or {_LINEAR!r}")

    @property
    def rotary_share(self) -> float:
        """A quarter of a head."""
        return 0.25

    def is_linear(self, index: int) -> bool:
        """Whether layer `index` is a delta net; what drafts behind the last has attention."""
        if index >= self.num_hidden_layers:
            return False
        if self.layer_types is not None:
            return self.layer_types[index] == _LINEAR
        return (index + 1) % self.full_attention_interval != 0

    def mixer(self, index: int, *, interleaved: bool) -> GatedDeltaNet | GroupedQueryAttention:
        """The first half of layer `index`."""
        if not self.is_linear(index):
            return GroupedQueryAttention.from_config(
                self,
                qk_norm="head",
                qkv_bias=self.attention_bias,
                o_bias=self.attention_bias,
                gated=True,
            )
        return GatedDeltaNet(
            hidden_size=self.hidden_size,
            num_key_heads=self.linear_num_key_heads,
            num_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            kernel=self.linear_conv_kernel_dim,
            norm=self.norm,
            interleaved=interleaved,
        )
