"""What every test may use. Fixtures of one layer live in that layer's folder."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Let child processes import the same `colibri` as the tests do."""
    paths = [str(config.rootpath / entry) for entry in config.getini("pythonpath")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@pytest.fixture(scope="session")
def shared_fixtures() -> Path | None:
    """The large golden models that may lie beside the checkout; None where they do not."""
    folder = ROOT.parent / "shared" / "fixtures"
    return folder if folder.is_dir() else None
