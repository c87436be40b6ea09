"""A known model under another name opens when the user says what it is, and is announced."""

import json
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.errors import ConfigError, UnsupportedModelError
from tests.tiny import PLAIN, SPARSE, write_tiny

IDS = [5, 9, 301, 77]


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A checkpoint of a known family, renamed, and wrapped as multimodal ones are."""
    path = write_tiny(tmp_path / "model", PLAIN)
    config = json.loads((path / "config.json").read_text())
    text = {**config, "model_type": "made_up_text"}
    whole = {"model_type": "made_up", "text_config": text}
    (path / "config.json").write_text(json.dumps(whole))
    return path


def test_it_is_refused_with_the_way_out(stranger: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'made_up_text' is unknown.*--family"):
        LLM.open(stranger)


def test_it_opens_when_it_is_said_what_it_is(
    stranger: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = write_tiny(tmp_path / "original", PLAIN)
    with LLM.open(original) as llm:
        expected = llm.logits(IDS)
    assert "family" not in caplog.text
    with LLM.open(stranger, family=PLAIN.model_type) as llm:
        assert np.array_equal(llm.logits(IDS), expected)
    assert f"read as that of {PLAIN.model_type} because `family` says so" in caplog.text


def test_what_it_is_not_is_refused(stranger: Path) -> None:
    other = next(family for family in SPARSE if family is not PLAIN)
    with pytest.raises((ConfigError, UnsupportedModelError)):
        LLM.open(stranger, family=other.model_type)
    with pytest.raises(UnsupportedModelError, match="'nothing' is unknown"):
        LLM.open(stranger, family="nothing")
