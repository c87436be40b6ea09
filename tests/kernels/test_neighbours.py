"""The pool on a crowded machine: few CPUs, other processes, forks. Processor time, no clocks."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri.formats import FORMATS
from colibri.kernels import cpus
from colibri.kernels.api import Matrix
from colibri.kernels.native import NativeKernels
from tests.kernels.builders import LIMITS, assert_same_bits, gaussian, generator, matrix, native

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs the scheduler calls of Linux"
)

M: Matrix = matrix(generator(1), FORMATS["int4-g64"], 1024, 512)
X = gaussian(generator(2), 1, 512)
JOBS = 1500
TASKS = Path("/proc/self/task")

# Told to go, does its jobs, then says what processor time that took; the first line is the pool's.
WORK = """
import sys, time
from tests.kernels.test_neighbours import JOBS, M, X, kernels_of
kernels = kernels_of(int(sys.argv[1]) if len(sys.argv) > 1 else None)
print(kernels.threads, flush=True)
sys.stdin.readline()
before = time.process_time()
for _ in range(JOBS):
    kernels.matmul(M, X)
print(time.process_time() - before, flush=True)
"""


def kernels_of(threads: int | None) -> NativeKernels:
    kernels = NativeKernels(threads=threads)
    kernels.reserve(LIMITS)
    return kernels


def tasks() -> set[str]:
    """Threads of this process."""
    return {task.name for task in TASKS.iterdir()}


def spent(threads: int | None, companions: int = 0, cpu: int | None = None) -> list[float]:
    """Processor time of the jobs of a process, and of companions that do theirs meanwhile."""
    pin = ["taskset", "-c", str(cpu)] if cpu is not None else []
    command = [*pin, sys.executable, "-c", WORK, *([str(threads)] if threads else [])]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as running:
        processes = [
            running.enter_context(subprocess.Popen(command, **pipes)) for _ in range(1 + companions)
        ]
        for process in processes:
            assert int(process.stdout.readline()) == (threads or cpus.num_threads())
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return [float(process.stdout.readline()) for process in processes]


def test_a_process_with_one_cpu_computes_on_one_thread() -> None:
    allowed = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {allowed})
        assert cpus.num_threads() == 1
        assert cpus.affinity_mask() == str(allowed)
        known = tasks()
        kernels = kernels_of(None)
        assert kernels.threads == 1
        assert tasks() <= known
        assert_same_bits(kernels.matmul(M, X), native().matmul(M, X))
    finally:
        os.sched_setaffinity(0, before)


def test_threads_beyond_the_cpus_do_no_more_work() -> None:
    """On one CPU, eight threads take turns: they wait asleep or give way, and burn little."""
    cpu = min(os.sched_getaffinity(0))
    (alone,), (crowd,) = spent(1, cpu=cpu), spent(8, cpu=cpu)
    assert crowd < 6 * alone + 0.5


def test_two_processes_share_the_cpus() -> None:
    """Both come to their end, and neither pays for the other with more than its own work."""
    (alone,) = spent(None)
    for each in spent(None, companions=1):
        assert each < 6 * alone + 0.5


def states(threads: set[str]) -> set[str]:
    return {(TASKS / task / "stat").read_text().rpartition(") ")[2][0] for task in threads}


def spent_ns(threads: set[str]) -> int:
    """Processor time of threads."""
    return sum(int((TASKS / task / "schedstat").read_text().split()[0]) for task in threads)


def test_between_tokens_all_threads_sleep() -> None:
    known = tasks()
    kernels = kernels_of(3)
    mine = tasks() - known
    assert len(mine) == 2
    for _ in range(20):
        kernels.matmul(M, X)
    for _ in range(1_000_000):
        if states(mine) == {"S"}:
            break
    before = spent_ns(mine)
    sum(range(3_000_000))
    assert spent_ns(mine) == before
    assert states(mine) == {"S"}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    kernels = kernels_of(3)
    wanted = kernels.matmul(M, X)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that hangs is a failure
        own = kernels_of(2)
        same = all(np.array_equal(each.matmul(M, X), wanted) for each in (own, kernels) * 20)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert_same_bits(kernels.matmul(M, X), wanted)
