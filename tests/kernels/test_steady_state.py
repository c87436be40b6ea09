"""Nothing is allocated, locked or asked of the system while tokens are computed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("counting needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("counting") / "counting.so"
    source = ROOT / "tests/kernels/counting.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return library


def counted(counting: Path, threads: int) -> list[int]:
    """Allocations, locks and system calls of 50 layers."""
    paths = os.pathsep.join([*sys.path, str(ROOT)])
    environment = {**os.environ, "LD_PRELOAD": str(counting), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tests.kernels.steady_state", str(threads)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


def test_one_thread_asks_for_nothing(counting: Path) -> None:
    assert counted(counting, 1) == [0, 0, 0]


def test_several_threads_neither_allocate_nor_lock(counting: Path) -> None:
    """How often a worker must be woken depends on how long it was kept waiting."""
    assert counted(counting, 2)[:2] == [0, 0]
