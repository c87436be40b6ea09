import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real checkpoint."""
    directory = tmp_path_factory.mktemp("llm") / "tiny"
    tool = str(ROOT / "tools" / "make_checkpoint.py")
    subprocess.run(
        [sys.executable, tool, str(directory), "--shape", "tiny"], check=True, capture_output=True
    )
    return directory
