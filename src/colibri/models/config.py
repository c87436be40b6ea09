"""Typed reading of config.json: declared keys are checked, undeclared ones refused by name.

Field names are Hugging Face's keys. A field without a default is required. A key that no field
declares must be one that cannot change the computation (`_INERT`) or be switched off (null, false,
0, empty); anything else is refused, since a model computed without it would be another model.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from colibri.errors import ConfigError, UnsupportedModelError
from colibri.nn.norm import RMSNorm
from colibri.nn.rope import Rope

_INERT = re.compile(
    r"""_.* | architectures | quantization_config
    | auto_map | transformers_version | tokenizer_class | name_or_path
    | model_name | dtype | torch_dtype | torchscript | use_bfloat16 | use_cache
    | .*_dropout | dropout | initializer_.* | router_.*_coef | router_jitter_noise
    | output_(attentions|hidden_states|router_logits|scores|past) | return_dict.*
    | (pad|sep|decoder_start|cls|mask)_token_id
    | id2label | label2id | problem_type | finetuning_task | task_specific_params
    | is_decoder | is_encoder_decoder | chunk_size_feed_forward | pretraining_tp | prefix
    | max_length | min_length | do_sample | temperature | top_[kp] | num_beams.*
    | length_penalty | early_stopping | num_return_sequences | pruned_heads
    | (attn|experts)_implementation | use_flash_attn | max_window_layers
    | num_nextn_predict_layers | rope_theta | language_model_only
    | (vision|image|video|audio)_\w+
    | seq_aux | aux_loss_alpha | ep_size | index_share_for_mtp_iteration
    | number_of_conv_states""",
    re.VERBOSE,
)
# Checked wherever a family declares them and they are given.
_POSITIVE = {
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "clip_qkv",
}
# Positions are 32-bit numbers.
_POSITIONS = {"max_position_embeddings", "sliding_window", "sliding_window_size"}
_MOST_POSITIONS = (1 << 31) - 1
# Far above any model: a damaged count must not keep the loader busy, nor size an allocation.
_MOST_LAYERS, _MOST_EXPERTS, _MOST_HEAD_WIDTH = 1 << 12, 1 << 16, 1 << 16
FULL, SLIDING = "full_attention", "sliding_attention"
Tokens = int | tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The keys that every decoder has; families add their own as fields."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    bos_token_id: Tokens = None
    eos_token_id: Tokens = None

    default_rope_theta: ClassVar[float] = 10000.0
    default_rope: ClassVar[Mapping[str, Any]] = {}  # where the config names no kind
    partial_rotary: ClassVar[bool] = False  # whether the family rotates a part of a head only
    centred_norms: ClassVar[bool] = False  # whether the family stores its norms' weights minus 1
    unused_keys: ClassVar[frozenset[str]] = frozenset()  # of other parts than the text

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Build from a normalised config.json (`colibri.checkpoint.config.normalize`).

        Raises:
            ConfigError: a required key is missing, a value has the wrong type or contradicts
                another.
            UnsupportedModelError: a key that would change the computation and is not implemented.
        """
        known = {item.name: item for item in fields(cls)}
        hints = typing.get_type_hints(cls)
        values = {
            key: _typed(key, value, hints[key])
            for key, value in config.items()
            if key in known and (value is not None or _may_be_null(hints[key]))
        }
        for item in known.values():
            _require(item, values, cls.__module__)
        for key, value in config.items():
            inert = key in cls.unused_keys or _INERT.fullmatch(key) is not None
            if key not in known and not inert and not is_off(key, value):
                raise UnsupportedModelError(
                    f"config.json: {key} = {value!r} is not implemented for model_type "
                    f"{config.get('model_type')!r} and may change the result; the model is refused "
                    "rather than computed wrongly"
                )
        read = cls(**values)
        read.check()
        return read

    def check(self) -> None:
        """Refuse values that contradict each other or are not implemented; families extend it.

        Raises:
            ConfigError: sizes that do not divide or are not positive.
            UnsupportedModelError: an activation other than silu.
        """
        if self.hidden_act != "silu":
            raise UnsupportedModelError(
                f"config.json: hidden_act = {self.hidden_act!r} is not implemented; only 'silu' is"
            )
        for key in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ):
            self.require(getattr(self, key) > 0, key, "must be positive")
        limited = self.num_hidden_layers <= _MOST_LAYERS
        self.require(limited, "num_hidden_layers", f"must be at most {_MOST_LAYERS}")
        self.require(self.kv_heads > 0, "num_key_value_heads", "must be positive")
        self.require(
            self.num_attention_heads % self.kv_heads == 0,
            "num_key_value_heads",
            "must divide num_attention_heads",
        )
        self.require(
            self.head_dim is not None or self.hidden_size % self.num_attention_heads == 0,
            "hidden_size",
            "must be a multiple of num_attention_heads where head_dim is not given",
        )
        width = self.head_width
        self.require(width > 0 and width % 2 == 0, "head_dim", "must be even")
        self.require(width <= _MOST_HEAD_WIDTH, "head_dim", f"must be at most {_MOST_HEAD_WIDTH}")
        self.require(self.rms_norm_eps >= 0, "rms_norm_eps", "must not be negative")
        for key in _POSITIVE & {item.name for item in fields(self)}:
            value = getattr(self, key)
            self.require(value is None or value > 0, key, "must be positive")
        for key in _POSITIONS & {item.name for item in fields(self)}:
            most = _MOST_POSITIONS
            self.require((getattr(self, key) or 0) <= most, key, f"must be at most {most:,}")

    def require(self, holds: bool, key: str, rule: str) -> None:
        """Raise ConfigError with the key, its value and the rule unless it holds."""
        if not holds:
            raise ConfigError(f"config.json: {key} = {getattr(self, key)!r} {rule}")

    @property
    def norm(self) -> RMSNorm:
        """The norm of the model."""
        return RMSNorm(self.rms_norm_eps, self.centred_norms)

    @property
    def num_ids(self) -> int:
        """Ids that tokens may have; the embedding may have further rows, which pad it."""
        return self.vocab_size

    @property
    def kv_heads(self) -> int:
        """num_key_value_heads, one a query head where it is not given."""
        return (
            self.num_attention_heads
            if self.num_key_value_heads is None
            else self.num_key_value_heads
        )

    @property
    def head_width(self) -> int:
        """head_dim, hidden_size / num_attention_heads where it is not given."""
        return (
            self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim
        )

    @property
    def rotary_share(self) -> float:
        """The part of a head that is rotated where the rope keys do not say."""
        return 1.0

    @property
    def rope_pairing(self) -> Literal["half", "pair"]:
        """Which dims of a head are rotated together."""
        return "half"

    @cached_property
    def rope(self) -> Rope:
        """The rotary embedding of `rope_parameters`."""
        parameters = {
            "rope_theta": self.default_rope_theta,
            "partial_rotary_factor": self.rotary_share,
            **({} if "rope_type" in self.rope_parameters else self.default_rope),
            **self.rope_parameters,
        }
        share = parameters.get("partial_rotary_factor")
        if share not in (None, 1) and not self.partial_rotary:
            raise UnsupportedModelError(
                f"config.json: partial_rotary_factor = {share!r} is not implemented for model_type "
                f"{self.model_type!r}, whose heads are rotated whole"
            )
        limit = self.max_position_embeddings
        return Rope.from_parameters(
            parameters,
            head_dim=self.head_width,
            max_position_embeddings=limit,
            pairing=self.rope_pairing,
        )


@dataclass(frozen=True, kw_only=True)
class PairableConfig(BaseConfig):
    """`rope_interleave`: rows of q and k lie so that rope turns neighbours."""

    rope_interleave: bool = False

    @property
    def rope_pairing(self) -> Literal["half", "pair"]:
        """`rope_interleave` pairs neighbours."""
        return "pair" if self.rope_interleave else "half"


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(BaseConfig):
    """Keys of Qwen2's windows.

    `layer_types` says which layers slide; without it, those that `slides_by_index` names.
    """

    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    def check(self) -> None:
        """A window that is used is given; each layer has a known kind."""
        super().check()
        given = not self.use_sliding_window or (self.sliding_window or 0) > 0
        self.require(given, "sliding_window", "must be positive where use_sliding_window is true")
        kinds = (FULL,) * self.num_hidden_layers if self.layer_types is None else self.layer_types
        known = len(kinds) == self.num_hidden_layers and {*kinds} <= {FULL, SLIDING}
        self.require(known, "layer_types", f"must give each layer {FULL!r} or {SLIDING!r}")
        used = self.use_sliding_window or SLIDING not in kinds
        self.require(used, "layer_types", "has sliding layers, but use_sliding_window is false")

    def window(self, index: int) -> int | None:
        """The window of layer `index`, None where it sees everything."""
        if not self.use_sliding_window:
            return None
        if self.layer_types is not None:
            slides = self.layer_types[index] == SLIDING
        else:
            slides = self.slides_by_index(index)
        return self.sliding_window if slides else None

    def slides_by_index(self, index: int) -> bool:
        """Whether layer `index` slides where `layer_types` is not given."""
        return index >= self.max_window_layers


@dataclass(frozen=True, kw_only=True)
class MoEConfig(BaseConfig):
    """Keys of softmax-routed experts."""

    num_experts: int
    num_experts_per_tok: int

    def check(self) -> None:
        """Sizes of the router."""
        super().check()
        limited = 0 < self.num_experts <= _MOST_EXPERTS
        self.require(limited, "num_experts", f"must be 1 to {_MOST_EXPERTS}")
        self.require(
            0 < self.num_experts_per_tok <= self.num_experts,
            "num_experts_per_tok",
            "must be 1..num_experts",
        )


@dataclass(frozen=True, kw_only=True)
class StridedMoEConfig(MoEConfig):
    """Sparse layers at a stride, with exceptions; the others are dense with `intermediate_size`."""

    intermediate_size: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def check(self) -> None:
        """Sizes of the pattern."""
        super().check()
        self.require(self.decoder_sparse_step > 0, "decoder_sparse_step", "must be positive")

    def is_sparse(self, index: int) -> bool:
        """Whether layer `index` has routed experts; what drafts behind the last always has."""
        if index >= self.num_hidden_layers:
            return True
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0


def _require(item: Field[Any], values: Mapping[str, Any], module: str) -> None:
    optional = item.default is not MISSING or item.default_factory is not MISSING
    if not optional and item.name not in values:
        raise ConfigError(
            f"config.json: the key {item.name} is missing; {module.rsplit('.', 1)[-1]} needs it"
        )


def _may_be_null(hint: Any) -> bool:
    """Whether null is a value of its own; elsewhere it says nothing, and the default holds."""
    return types.NoneType in typing.get_args(hint)


def is_off(key: str, value: Any) -> bool:
    """Whether a key's value asks for nothing."""
    if key == "layer_types" and isinstance(value, list):
        return set(value) <= {"full_attention"}
    return value is None or value is False or value in (0, "", [], {})


def _typed(key: str, value: Any, hint: Any) -> Any:
    """Check `value` against a field's annotation; lists become tuples, whole numbers floats."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    for option in typing.get_args(hint) if is_union else (hint,):
        kind = typing.get_origin(option) or option
        if kind is tuple and isinstance(value, list):
            item = typing.get_args(option)[0]
            return tuple(_typed(f"{key}[{i}]", found, item) for i, found in enumerate(value))
        if kind is float and _is_a(value, int | float) and abs(value) <= sys.float_info.max:
            return float(value)
        if kind is not float and _is_a(value, kind):
            return value
    wanted = hint.__name__ if isinstance(hint, type) else hint
    raise ConfigError(f"config.json: {key} = {value!r} has the wrong type, wanted {wanted}")


def _is_a(value: Any, kind: Any) -> bool:
    """isinstance, but a bool is no number."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
