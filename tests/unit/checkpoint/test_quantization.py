"""`quantization_config` is understood, or refused by key and value."""

import copy
from typing import Any

import pytest

from colibri.checkpoint.quantization import Quantization
from colibri.errors import ColibriError
from colibri.formats import FP8_B16, FP8_B128

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "weights": {
                **{"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
                **{"symmetric": True, "dynamic": False, "actorder": None},
            },
        }
    },
}


def read(config: object) -> Quantization:
    return Quantization.read({"quantization_config": config})


def test_known_ones() -> None:
    assert Quantization.read({}) == Quantization()
    assert read({**FP8, "weight_block_size": [128, 128]}).fp8 is FP8_B128
    assert read({**FP8, "weight_block_size": [32, 16]}).fp8 is FP8_B16
    assert read({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}).fp8 is None
    assert read(INT4).group == 32


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq"}, "quant_method = 'gptq'"),
        (FP8, "weight_block_size = None"),
        ({**FP8, "weight_block_size": [1, 32]}, r"weight_block_size = \[1, 32\]"),
        ({**FP8, "weight_block_size": [128, 128], "activation_scheme": "static"}, "'static'"),
        ({**FP8, "weight_block_size": [128, 128], "tomorrow": 1}, "tomorrow = 1"),
        ({**INT4, "format": "float-quantized"}, "format = 'float-quantized'"),
        ("fp8", "is no object"),
    ],
)
def test_others_are_refused(config: object, named: str) -> None:
    with pytest.raises(ColibriError, match=named):
        read(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_bits", 8), ("symmetric", False), ("actorder", "group"), ("group_size", 48)],
)
def test_other_codes_are_refused(key: str, value: object) -> None:
    config = copy.deepcopy(INT4)
    config["config_groups"]["group_0"]["weights"][key] = value
    with pytest.raises(ColibriError, match=f"weights.{key} = {value!r}"):
        read(config)
