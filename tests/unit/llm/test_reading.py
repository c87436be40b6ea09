"""Where experts are read from, and how, changes no token."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri import LLM
from colibri.errors import CheckpointError

PROMPT = [17, 200, 3, 88, 45, 45, 9, 120, 33, 7]


@pytest.fixture
def mirror(tiny: Path, tmp_path: Path) -> Path:
    """A whole copy of the checkpoint."""
    shutil.copytree(tiny, tmp_path / "mirror")
    return tmp_path / "mirror"


@pytest.mark.parametrize(
    "options",
    [
        {"reader_threads": 1},
        {"reader_threads": 7, "read_block": 4096},
        {"read_block": 0},
        {"verify_reads": False},
        {"kernels": "reference", "read_block": 8192, "reader_threads": 2},
    ],
)
@pytest.mark.parametrize("mirrored", [False, True])
def test_reading_changes_no_bit(
    tiny: Path, mirror: Path, options: dict[str, Any], mirrored: bool
) -> None:
    kernels = options.get("kernels", "auto")
    with LLM.open(tiny, kernels=kernels) as llm:
        expected = llm.logits(PROMPT)
    more = {"mirror": [str(mirror)]} if mirrored else {}
    with LLM.open(tiny, expert_slots=6, **options, **more) as llm:
        assert np.array_equal(llm.logits(PROMPT), expected)


def test_a_mirror_removed_while_running_changes_no_token(
    tiny: Path, mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    with LLM.open(tiny, expert_slots=6) as llm:
        expected = llm.generate(PROMPT, **request).token_ids
    with LLM.open(tiny, expert_slots=6, mirror=mirror) as llm, caplog.at_level(logging.WARNING):
        found = []
        with llm.stream(PROMPT, **request) as stream:
            for number, chunk in enumerate(stream):
                found += chunk.token_ids
                if number == 3:
                    for path in mirror.glob("*.safetensors"):
                        os.truncate(path, 0)
                        path.unlink()
    assert found == expected
    assert [str(mirror) in r.getMessage() for r in caplog.records] == [True]


def test_slots_retired_while_running_change_no_token(tiny: Path) -> None:
    request: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
    with LLM.open(tiny, expert_slots=16) as llm:
        expected = llm.generate(PROMPT, **request).token_ids
        model = llm._model
        assert model is not None
        found = []
        with llm.stream(PROMPT, **request) as stream:
            for chunk in stream:
                found += chunk.token_ids
                model.store.retire(model.store.slots_bytes // 8)
        assert model.store.retired_bytes > model.store.slots_bytes // 3
    assert found == expected


def test_a_mirror_of_another_model_is_refused(tiny: Path, mirror: Path) -> None:
    path = next(mirror.glob("experts*.safetensors"))
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    with pytest.raises(CheckpointError, match="is not that of"):
        LLM.open(tiny, mirror=mirror)
