import json
from pathlib import Path
from typing import Any

import pytest

from colibri.engine.request import SamplingParams
from colibri.errors import CheckpointError, RequestError
from colibri.llm.defaults import GenerationDefaults


def load(directory: Path, **config: Any) -> GenerationDefaults:
    (directory / "generation_config.json").write_text(json.dumps(config))
    return GenerationDefaults.load(directory)


def test_without_a_file_decoding_is_greedy(tmp_path: Path) -> None:
    assert GenerationDefaults.load(tmp_path).params() == SamplingParams()


def test_values_without_do_sample_do_not_count(tmp_path: Path) -> None:
    assert load(tmp_path, temperature=0.7, top_p=0.9).params().temperature == 0


def test_explicit_beats_file_beats_greedy(tmp_path: Path) -> None:
    defaults = load(tmp_path, do_sample=True, temperature=0.7, top_p=0.9, top_k=None)
    params = defaults.params(top_p=0.5, top_k=None, max_tokens=3)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.7, 0.5, 0, 3)
    assert defaults.params(temperature=0).temperature == 0
    assert load(tmp_path, do_sample=True).params().temperature == 1


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}])
def test_asking_for_a_filter_is_asking_to_sample(tmp_path: Path, filters: dict[str, Any]) -> None:
    assert GenerationDefaults.load(tmp_path).params(**filters).temperature == 1
    assert GenerationDefaults.load(tmp_path).params(**filters, temperature=0).temperature == 0


@pytest.mark.parametrize(("value", "ids"), [(None, set()), (2, {2}), ([2, 3], {2, 3})])
def test_end_ids(tmp_path: Path, value: Any, ids: set[int]) -> None:
    assert load(tmp_path, eos_token_id=value).eos_ids == ids


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"do_sample": True, "top_p": 7}, "top_p is 7"),
        ({"do_sample": True, "temperature": "hot"}, "temperature is 'hot'"),
        ({"eos_token_id": "two"}, "eos_token_id is 'two'"),
        ({"eos_token_id": [True]}, "eos_token_id is"),
        ({"eos_token_id": [2, -1]}, "eos_token_id is"),
        ({"do_sample": "true"}, "do_sample is 'true'"),
    ],
)
def test_a_bad_value_names_the_file(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{message}"):
        load(tmp_path, **config)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100000])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        GenerationDefaults.load(tmp_path)


def test_stop_ids_may_be_any_collection(tmp_path: Path) -> None:
    assert load(tmp_path).params(stop_ids={3}).stop_ids == (3,)
    with pytest.raises(RequestError, match="stop_ids"):
        load(tmp_path).params(stop_ids="ab")
