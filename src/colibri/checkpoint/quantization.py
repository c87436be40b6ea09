"""`quantization_config`, understood once: what is not read is refused by name and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from colibri.checkpoint.strict_json import shown
from colibri.errors import ConfigError, UnsupportedModelError
from colibri.formats import FP8_B16, FP8_B32, FP8_B64, FP8_B128, FP8Format, Shape

_FP8 = (FP8_B128, FP8_B64, FP8_B32, FP8_B16)
_ANY = object()  # a key whose value changes nothing that is computed here
_FLOAT_LISTS = {"modules_to_not_convert": _ANY, "ignored_layers": _ANY, "ignore": _ANY}
_KEYS: dict[str, dict[str, tuple[object, ...]]] = {
    "fp8": {
        "fmt": ("e4m3", None),
        "activation_scheme": ("dynamic", None),
        "scale_fmt": ("ue8m0", "float", None),
        "expert_dtype": ("fp4", None),
    },
    "mxfp4": {"dequantize": (False, None), "use_kernels": (False, True, None)},
    "compressed-tensors": {
        "format": ("pack-quantized", "mxfp4-pack-quantized"),
        "quantization_status": ("compressed", "frozen", None),
        "kv_cache_scheme": (None,),
        "sparsity_config": (None, {}),
        "transform_config": (None, {}),
    },
}
_FREE = {
    "quant_method",
    "weight_block_size",
    "config_groups",
    "version",
    "global_compression_ratio",
}
_WEIGHTS: dict[str, dict[str, tuple[object, ...]]] = {
    "pack-quantized": {"num_bits": (4,), "type": ("int",), "group_size": (32, 64, 128)},
    "mxfp4-pack-quantized": {"num_bits": (4,), "type": ("float",), "group_size": (32,)},
}
_EVERY_WEIGHT: dict[str, tuple[object, ...]] = {
    "strategy": ("group",),
    "symmetric": (True,),
    "dynamic": (False, None),
    "actorder": (None,),
    "block_structure": (None,),
    "zp_dtype": (None,),
    "scale_dtype": (None, "torch.uint8"),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's coded matrices are to be read.

    Attributes:
        block: rows and columns that share a scale of fp8; None where there is no fp8.
        group: columns that share a scale of packed int4; None where there is none.
    """

    block: Shape | None = None
    group: int | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Quantization:
        """Out of a normalised config.json.

        Raises:
            ConfigError: a value of a wrong type.
            UnsupportedModelError: a method, or a value of a key, that is not read.
        """
        found = config.get("quantization_config")
        if found is None:
            return cls()
        if not isinstance(found, Mapping):
            raise ConfigError(f"config.json: quantization_config: {shown(found)} is no object")
        method = found.get("quant_method")
        if method not in _KEYS:
            _refuse("quant_method", method, tuple(_KEYS))
        for key, value in found.items():
            allowed = _KEYS[method].get(key)
            if allowed is not None and value not in allowed:
                _refuse(key, value, allowed)
            if allowed is None and key not in _FREE and key not in _FLOAT_LISTS and value:
                _refuse(key, value, ())
        if method == "fp8":
            return cls(block=_block(found.get("weight_block_size")))
        if method == "compressed-tensors":
            return cls(group=_group(found))
        return cls()

    @property
    def fp8(self) -> FP8Format | None:
        """The format of fp8 matrices: its square blocks divide those of the checkpoint."""
        block = self.block
        if block is None:
            return None
        return next(fmt for fmt in _FP8 if not block[0] % fmt.block and not block[1] % fmt.block)


def _block(value: object) -> Shape:
    least = FP8_B16.block
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int for n in value):
        _refuse("weight_block_size", value, ())
    rows, columns = value
    if rows <= 0 or columns <= 0 or rows % least or columns % least:
        _refuse("weight_block_size", value, (f"multiples of {least}",))
    return rows, columns


def _group(found: Mapping[str, Any]) -> int | None:
    """The group size that all config groups agree on, of int4."""
    groups, kind = found.get("config_groups"), found.get("format")
    if kind not in _WEIGHTS or not isinstance(groups, Mapping) or not groups:
        _refuse("format", kind, tuple(_WEIGHTS))
    sizes = set()
    for name, group in groups.items():
        where = f"config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            _refuse(where, group, ())
        for key in ("input_activations", "output_activations"):
            if group.get(key) is not None:
                _refuse(f"{where}.{key}", group[key], (None,))
        weights = group["weights"]
        for key, allowed in {**_WEIGHTS[kind], **_EVERY_WEIGHT}.items():
            if weights.get(key) not in allowed:
                _refuse(f"{where}.weights.{key}", weights.get(key), allowed)
        sizes.add(weights["group_size"])
    if len(sizes) > 1:
        _refuse("config_groups", sorted(sizes), ("one group_size",))
    return int(sizes.pop()) if kind == "pack-quantized" else None


def _refuse(key: str, value: object, allowed: tuple[object, ...]) -> NoReturn:
    known = f"; read are {', '.join(map(str, allowed))}" if allowed else ""
    raise UnsupportedModelError(
        f"config.json: quantization_config.{key} = {shown(value)} is not implemented{known}"
    )
