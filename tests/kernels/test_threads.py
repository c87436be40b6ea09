"""The thread pool: any number of threads, beside other pools, and after a fork."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from colibri.errors import NativeLibraryError, SettingsError
from colibri.formats import FORMATS
from colibri.kernels import cpus, library, make_kernels, why_reference
from colibri.kernels.api import Activations, Matrix
from colibri.kernels.native import NativeKernels, instruction_sets
from tests.kernels.builders import (
    LIMITS,
    assert_same_bits,
    gaussian,
    generator,
    matrix,
    native,
    variants,
)

M: Matrix = matrix(generator(1), FORMATS["int4-g64"], 257, 130)
X = gaussian(generator(2), 3, 130)


def kernels_of(threads: int) -> NativeKernels:
    kernels = NativeKernels(threads=threads)
    kernels.reserve(LIMITS)
    return kernels


def test_many_jobs_on_more_threads_than_processors() -> None:
    wanted = native().matmul(M, X)
    kernels = kernels_of(5)
    for _ in range(300):
        assert_same_bits(kernels.matmul(M, X), wanted)


def test_reading_meets_every_word_whatever_the_instruction_set() -> None:
    data = generator(3).integers(0, 256, 300_011, np.uint8)
    words = data[: data.size // 8 * 8].view(np.uint64)
    for kernels in variants("int16"):
        assert kernels.read_sum(data) == int(words.sum(dtype=np.uint64))


def test_two_engines_at_once() -> None:
    wanted = native().matmul(M, X)

    def work(kernels: NativeKernels) -> None:
        for _ in range(100):
            assert_same_bits(kernels.matmul(M, X), wanted)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [kernels_of(2), kernels_of(2)])) == [None, None]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_computes_alone() -> None:
    kernels = kernels_of(3)
    wanted = kernels.matmul(M, X)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(kernels.matmul(M, X), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0


def thread_ids() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def test_threads_end_with_their_kernels() -> None:
    before = thread_ids()
    kernels = kernels_of(4)
    started = thread_ids() - before
    assert len(started) == 3
    del kernels
    for _ in range(100_000):  # the system lists a thread a moment longer than it runs
        if not started & thread_ids():
            break
        os.sched_yield()
    assert not started & thread_ids()


def test_the_choice_of_kernels() -> None:
    assert why_reference() is None
    assert make_kernels("reference").name == "reference"
    assert make_kernels("native", 1).name == "native"
    chosen = make_kernels("auto", 1, "int8")
    assert (chosen.name, chosen.activations) == ("native", Activations.INT8)


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(SettingsError, match="known are auto, native, reference"):
        make_kernels("fast")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="known are float32, int16, int8"):
        make_kernels("auto", 1, "int4")
    with pytest.raises(SettingsError, match="at least 1"):
        make_kernels("native", 0)
    with pytest.raises(SettingsError, match="generic"):
        NativeKernels(threads=1, isa="sse9")
    assert instruction_sets()[-1] == "generic"


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable_reason", lambda: "no C compiler found")
    assert make_kernels("auto").name == "reference"
    with pytest.raises(NativeLibraryError, match="no C compiler found"):
        make_kernels("native")


def test_another_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", -1)
    with pytest.raises(NativeLibraryError, match="this package -1"):
        library.load.__wrapped__()


def test_processors(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    assert cpus.cgroup_cpus(tmp_path, groups) is None
    groups.write_text("4:cpuset:/c\n3:cpu,cpuacct:/a\n0::/b/c\n")
    assert cpus.cgroup_cpus(tmp_path, groups) is None
    for folder in ("cpu/a", "b/c", "c"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "cpu/a/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/a/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "b/c/cpu.max").write_text("max 100000\n")
    (tmp_path / "c/cpu.max").write_text("100000 100000\n")
    assert cpus.cgroup_cpus(tmp_path, groups) is None
    (tmp_path / "cpu/a/cpu.cfs_quota_us").write_text("550000\n")
    assert cpus.cgroup_cpus(tmp_path, groups) == 6
    (tmp_path / "b/c/cpu.max").write_text("400000 100000\n")
    assert cpus.cgroup_cpus(tmp_path, groups) == 4
    (tmp_path / "b/cpu.max").write_text("150000 100000\n")
    assert cpus.cgroup_cpus(tmp_path, groups) == 2
    assert 1 <= cpus.num_threads() <= cpus.affinity_cpus()
