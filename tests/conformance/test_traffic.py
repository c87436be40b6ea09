"""What a prefill chunk reads is the union of its experts less the hits, each record once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri import LLM
from colibri.kernels.api import Routing
from colibri.models.family import Family
from tests.conformance.cases import record_nbytes
from tests.tiny import SPARSE, SPELLINGS, write_tiny

IDS = np.random.RandomState(5).randint(3, 512, 48).astype(np.int32)
CHUNK = 16


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", SPARSE, ids=lambda f: f.model_type)
def test_a_chunk_reads_its_union_once(family: Family, spelling: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, family, spelling=spelling)
    record = record_nbytes(family)
    unions: list[tuple[int, set[int]]] = []

    def keep(layer: int, routing: Routing) -> None:
        unions.append((layer, set(routing.ids.ravel().tolist())))

    with LLM.open(path, expert_slots="100%", prefill_chunk=CHUNK, warm_start=False) as llm:
        llm.logits(IDS, routes=keep)
        traffic = llm.metrics().experts
    seen: set[tuple[int, int]] = set()
    requests = misses = 0
    for layer, union in unions:
        new = {(layer, expert) for expert in union} - seen
        requests, misses, seen = requests + len(union), misses + len(new), seen | new
    assert (traffic.requests, traffic.misses) == (requests, misses)
    assert traffic.hits == requests - misses > 0
    assert traffic.bytes_read == misses * record
    assert traffic.slack_bytes > 0
