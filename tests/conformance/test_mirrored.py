"""A mirror only ever makes things faster: with it, without it, and while it goes away."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.models.family import Family
from tests.conformance.cases import least_slots
from tests.tiny import SPARSE, write_tiny

IDS = np.random.RandomState(5).randint(3, 512, 6).astype(np.int32)
TOKENS, GONE_AFTER = 10, 3


@pytest.fixture(scope="module", params=SPARSE, ids=lambda f: f.model_type)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: Family = request.param
    return write_tiny(tmp_path_factory.mktemp(family.model_type) / "model", family)


def test_a_mirror_that_is_removed_while_running(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files are cut and unlinked between two tokens: the model's own serve instead."""
    settings = {"expert_slots": least_slots(model), "heat": False}
    with LLM.open(model, **settings) as llm:
        expected = llm.generate(IDS, max_tokens=TOKENS, temperature=0, ignore_eos=True).token_ids
    mirror = tmp_path / "copy"
    shutil.copytree(model, mirror)
    found = []
    with (
        caplog.at_level(logging.WARNING),
        LLM.open(model, mirror=(str(mirror),), **settings) as llm,
        llm.stream(IDS, max_tokens=TOKENS, temperature=0, ignore_eos=True) as stream,
    ):
        for number, chunk in enumerate(stream):
            found += chunk.token_ids
            if number == GONE_AFTER:
                for path in mirror.iterdir():
                    os.truncate(path, 0)
                    path.unlink()
        assert llm._model is not None
        stats = llm._model.store.stats
    assert found == list(expected)
    assert (stats.failed, stats.hits + stats.misses) == (0, stats.requests)
    assert stats.drive_bytes[1] > 0
    assert stats.rescued > 0
    told = [record for record in caplog.records if "is not read any more" in record.message]
    assert len(told) == 1
