"""Limits that the kernels are held against: they must exist for every family."""

from pathlib import Path

import numpy as np
import pytest

from colibri.kernels.library import unavailable_reason
from colibri.lab.limits import ArithmeticLimit
from colibri.lab.rig import Rig
from colibri.lab.routed import Script
from colibri.models.family import Family
from colibri.settings import Settings
from tests.tiny import each_sparse, write_tiny


@pytest.mark.skipif(unavailable_reason() is not None, reason=f"{unavailable_reason()}")
@each_sparse
def test_one_expert_in_cache(family: Family, tmp_path: Path) -> None:
    """Its copy holds the record wherever its parts lie in the slot."""
    settings = Settings(model=str(write_tiny(tmp_path, family)), threads=1)
    with Rig.open(settings, Script(np.zeros((1, 1, 1), np.int32), 1)) as rig:
        layout = rig.prepared.description.experts.layers[0]
        limit = ArithmeticLimit(rig.kernels, rig.model, layout.slot_nbytes)
        assert limit.expert_s(1) > 0
        assert limit.dense_s(1, 4096) > 0
