"""What a checkpoint's generation_config.json says, and how it meets a request's own arguments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from colibri.engine.request import SamplingParams
from colibri.errors import CheckpointError, RequestError

FILE_NAME = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FILTERS = ("top_p", "top_k", "min_p")


class GenerationDefaults:
    """Sampling values and end-of-turn ids of a checkpoint.

    Attributes:
        sampling: values that hold where a request gives none. Empty, which is greedy, unless the
            file says `do_sample`.
        eos_ids: its end-of-turn ids.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.sampling: dict[str, Any] = {}
        do_sample = config.get("do_sample")
        if not isinstance(do_sample, bool | None):
            raise CheckpointError(f"{path}: do_sample is {do_sample!r}: it must be true or false")
        if do_sample:
            given = {k: config[k] for k in _SAMPLING if config.get(k) is not None}
            self.sampling = {"temperature": 1.0, **given}
        self.eos_ids = token_ids(config.get("eos_token_id"), f"{path}: eos_token_id")
        try:
            self.params()
        except RequestError as error:
            raise CheckpointError(f"{path}: {error}") from error

    @classmethod
    def load(cls, directory: Path) -> GenerationDefaults:
        """Read the file of a checkpoint; without one there are no defaults.

        Raises:
            CheckpointError: it is broken, or a value is out of its range.
        """
        path = directory / FILE_NAME
        if not path.is_file():
            return cls({}, path)
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{path} holds a {type(config).__name__}, not a JSON object")
        return cls(config, path)

    def params(self, **explicit: Any) -> SamplingParams:
        """What holds for a request: its own values, else the file's, else greedy.

        Asking for `top_p`, `top_k` or `min_p` without a temperature samples at temperature 1.
        None counts as not given.

        Raises:
            RequestError: a value of a wrong type or out of its range.
        """
        given = {name: value for name, value in explicit.items() if value is not None}
        if any(name in given for name in _FILTERS):
            given = {"temperature": self.sampling.get("temperature", 1.0), **given}
        if isinstance(given.get("stop_ids"), Iterable):
            given["stop_ids"] = tuple(given["stop_ids"])
        return SamplingParams(**{**self.sampling, **given})


def token_ids(value: object, name: str) -> frozenset[int]:
    """Return ids that a file gives as one number, a list of them, or null.

    Raises:
        CheckpointError: something else.
    """
    listed = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in listed):
        raise CheckpointError(f"{name} is {value!r}: it must be a token id or a list of them")
    return frozenset(listed)
