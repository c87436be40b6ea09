import os

import pytest

from colibri.errors import SettingsError
from colibri.kernels import make_kernels
from colibri.kernels.cpus import affinity_cpus, affinity_mask
from colibri.kernels.native import NativeKernels, instruction_sets


@pytest.mark.parametrize("isa", instruction_sets())
def test_an_instruction_set_by_name(isa: str) -> None:
    made = make_kernels("native", 1, isa=isa)
    assert isinstance(made, NativeKernels)
    assert made.isa == isa


def test_auto_is_the_fastest() -> None:
    made = make_kernels("native", 1, isa="auto")
    assert isinstance(made, NativeKernels)
    assert made.isa == instruction_sets()[0]


def test_refusals() -> None:
    with pytest.raises(SettingsError, match="'mmx' does not run here"):
        make_kernels("native", 1, isa="mmx")
    with pytest.raises(SettingsError, match="for native kernels only"):
        make_kernels("reference", isa="generic")


@pytest.mark.parametrize(
    ("cpus", "mask"), [({0}, "0"), ({0, 1, 2, 5}, "0-2,5"), ({3, 4}, "3-4"), (set(), "")]
)
def test_affinity_mask(monkeypatch: pytest.MonkeyPatch, cpus: set[int], mask: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus)
    assert affinity_mask() == mask


def test_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert affinity_mask() is None
    assert affinity_cpus() == (os.cpu_count() or 1)
