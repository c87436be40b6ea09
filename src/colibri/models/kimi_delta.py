"""Keys of models with Kimi delta attention: which layers, and their sizes, in either spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from colibri.errors import ConfigError, UnsupportedModelError
from colibri.models.config import BaseConfig, is_off
from colibri.nn.delta import KimiDeltaAttention

_FULL, _LINEAR = "full_attention", "linear_attention"
_LAYERS = ("kda_layers", "full_attn_layers")
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
        """`linear_attn_config`, where it is given, stands for the keys it holds.

        Raises:
            ConfigError: as every config; it contradicts them, or has one that is not known.
        """
        flat, linear = dict(config), config.get("linear_attn_config") or {}
        flat.pop("linear_attn_config", None)
        for key, value in _flattened(linear, flat.get("num_hidden_layers")).items():
            if flat.get(key) is None:
                flat[key] = value
            elif _plain(flat[key]) != _plain(value):
                raise ConfigError(
                    f"config.json: {key} is {flat[key]!r} but linear_attn_config says {value!r};"
                    " they mean the same, remove the wrong one"
                )
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


def _flattened(linear: Any, count: Any) -> dict[str, Any]:
    """What `linear_attn_config` says, by the keys it stands for."""
    if not isinstance(linear, Mapping):
        raise ConfigError(f"config.json: linear_attn_config = {linear!r} must be an object")
    for key, value in linear.items():
        if key not in {*_NAMES, *_LAYERS, "safe_gate"} and not is_off(key, value):
            raise UnsupportedModelError(
                f"config.json: linear_attn_config.{key} = {value!r} is not implemented and may "
                "change the result"
            )
    flat = {ours: linear.get(theirs) for theirs, ours in _NAMES.items()}
    flat = {key: value for key, value in flat.items() if value is not None}
    if linear.get("safe_gate") is False:
        flat.setdefault("linear_lower_bound", None)
    if linear.keys() & {*_LAYERS}:
        delta, full = (linear.get(key) or [] for key in _LAYERS)
        flat["layer_types"] = _kinds(delta, full, count)
    return flat


def _plain(value: Any) -> Any:
    """For kinds of layers, which are linear: the others have several names."""
    return [kind == _LINEAR for kind in value] if isinstance(value, list) else value


def _kinds(delta: Any, full: Any, count: Any) -> list[str]:
    """Each layer's kind from two lists that number them from 1."""
    lists = isinstance(delta, list) and isinstance(full, list)
    numbers = [*delta, *full] if lists else []
    whole = all(type(number) is int for number in [*numbers, count])
    if not whole or sorted(numbers) != list(range(1, count + 1)):
        raise ConfigError(
            "config.json: linear_attn_config: kda_layers and full_attn_layers must name each of "
            f"the {count} layers once, from 1, found {delta} and {full}"
        )
    return [_LINEAR if number in delta else _FULL for number in range(1, count + 1)]
