"""Sizes and storage of published models, for random checkpoints like them: a data file each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from colibri.checkpoint.byte_tokenizer import END_OF_TEXT
from colibri.errors import UnsupportedModelError

_FILES = Path(__file__).with_name("published_configs")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_DENSE_LAYERS, _TABLE_ROWS = "first_k_dense_replace", "ngram_vocab_size_base"


@dataclass(frozen=True, slots=True)
class Published:
    """A model as it is published.

    Attributes:
        experts: format of routed experts.
        dense: format of matrices outside of them; embedding and head stay floats.
        config: the keys of config.json that the computation depends on.
    """

    experts: str
    dense: str
    config: Mapping[str, Any]

    def sized(
        self, num_layers: int | None = None, num_experts: int | None = None
    ) -> dict[str, Any]:
        """A config.json with its sizes, or smaller.

        Where there are fewer layers, at most one of them is dense; fewer experts are as many a
        token, and a table that stays on disk has fewer rows in proportion.
        """
        config = {"architectures": ["ForCausalLM"], "bos_token_id": None, **self.config}
        config["eos_token_id"] = END_OF_TEXT
        if num_layers is not None:
            config["num_hidden_layers"] = num_layers
            if config.get(_DENSE_LAYERS, 0) > 1:
                config[_DENSE_LAYERS] = 1
        if num_experts is not None:
            (key,) = (key for key in _EXPERTS if key in config)
            if _TABLE_ROWS in config:
                config[_TABLE_ROWS] = config[_TABLE_ROWS] * num_experts // config[key]
            config[key] = num_experts
        return config


@cache
def published_models() -> tuple[str, ...]:
    """Names of the models that are known."""
    return tuple(sorted(path.stem for path in _FILES.glob("*.json")))


def published_model(name: str) -> Published:
    """The model of that name.

    Raises:
        UnsupportedModelError: it is not known.
    """
    if name not in published_models():
        raise UnsupportedModelError(
            f"unknown model {name!r}: known are {', '.join(published_models())}"
        )
    return Published(**json.loads((_FILES / f"{name}.json").read_text(encoding="utf-8")))
