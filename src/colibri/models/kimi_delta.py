"""Keys of models with Kimi delta attention: which layers, and their sizes, in either spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from colibri.errors import ConfigError
from colibri.models.config import BaseConfig
from colibri.nn.delta import KimiDeltaAttention

_FULL, _LINEAR = "full_attention", "linear_attention"
_NAMES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}


@dataclass(frozen=True, kw_only=True)
class KimiDeltaConfig(BaseConfig):
    """`layer_types` and `linear_*`, or a `linear_attn_config` that says both."""

    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int = 4
    linear_lower_bound: float | None = None
    layer_types: tuple[str, ...] | None = None

    attention_kinds: ClassVar[frozenset[str]] = frozenset({_FULL})  # of layers that are not linear

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """`linear_attn_config`, where it is given, takes the place of the keys it stands for."""
        flat, linear = dict(config), config.get("linear_attn_config") or {}
        flat.pop("linear_attn_config", None)
        flat |= {ours: linear[theirs] for theirs, ours in _NAMES.items() if theirs in linear}
        if "kda_layers" in linear:
            flat["layer_types"] = _kinds(linear, flat.get("num_hidden_layers"))
        return super().read(flat)

    def check(self) -> None:
        """Sizes are positive and not absurd; each layer has a known kind."""
        super().check()
        for key, most in (
            ("linear_num_heads", 1 << 16),
            ("linear_head_dim", 1 << 10),
            ("linear_conv_kernel_dim", 16),
        ):
            self.require(0 < getattr(self, key) <= most, key, f"must be 1 to {most:,}")
        kinds = self.layer_types
        known = kinds is None or (
            len(kinds) == self.num_hidden_layers and {*kinds} <= self.attention_kinds | {_LINEAR}
        )
        others = " or ".join(map(repr, sorted(self.attention_kinds)))
        self.require(known, "layer_types", f"must give each layer {others} or {_LINEAR!r}")
        bound = self.linear_lower_bound
        self.require(bound is None or bound < 0, "linear_lower_bound", "must be negative")

    def is_linear(self, index: int) -> bool:
        """Whether layer `index` is recurrent; unless it is said, all but 4, 8 and so on."""
        if self.layer_types is not None:
            return self.layer_types[index] == _LINEAR
        return index == 0 or index % 4 != 0

    def delta_attention(self, a_log_shape: tuple[int, ...]) -> KimiDeltaAttention:
        """The mixer of the linear layers."""
        return KimiDeltaAttention(
            hidden_size=self.hidden_size,
            num_key_heads=self.linear_num_heads,
            num_heads=self.linear_num_heads,
            key_dim=self.linear_head_dim,
            value_dim=self.linear_head_dim,
            kernel=self.linear_conv_kernel_dim,
            norm=self.norm,
            lower_bound=self.linear_lower_bound,
            a_log_shape=a_log_shape,
        )


def _kinds(linear: Mapping[str, Any], count: Any) -> list[str]:
    """Each layer's kind from two lists that number them from 1."""
    delta, full = linear["kda_layers"], linear.get("full_attn_layers") or []
    if not isinstance(count, int) or sorted([*delta, *full]) != list(range(1, count + 1)):
        raise ConfigError(
            "config.json: linear_attn_config: kda_layers and full_attn_layers must name each of "
            f"the {count} layers once, from 1, found {delta} and {full}"
        )
    return [_LINEAR if number in delta else _FULL for number in range(1, count + 1)]
