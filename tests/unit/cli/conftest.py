import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from colibri.cli.main import app
from colibri.llm import LLM
from colibri.settings import Settings
from tests.unit.llm.fakes import FakeModel, make_llm, write_tokenizer

ROOT = Path(__file__).resolve().parents[3]


class Coli:
    """Runs commands in this process over a model whose replies are known.

    Attributes:
        model: the model, which every command gets anew but for what it says.
        settings: what the last command opened it with.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.context_length = 256
        self.settings: Settings | None = None
        self.model = FakeModel()
        self.prepare: Callable[[FakeModel], None] = lambda model: None

    def open(self, settings: Settings, progress: Callable[[str, int, int], None]) -> LLM:
        self.settings = settings
        progress("opening", 1, 1)
        llm, self.model = make_llm(
            self.directory, context_length=self.context_length, settings=settings
        )
        self.prepare(self.model)
        return llm

    def __call__(self, *arguments: str, stdin: str | bytes = "") -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin, prog_name="coli")


@pytest.fixture
def coli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Coli:
    write_tokenizer(tmp_path)
    made = Coli(tmp_path)
    monkeypatch.setattr(LLM, "from_settings", made.open)
    monkeypatch.setattr("colibri.llm.location.BUNDLED", tmp_path / "none")
    return made


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts from probes that are too short to be good, whatever else runs here."""
    for name, value in {"_WORKING_SET": 8 << 20, "_TURN_S": 1e-4, "_MOST_OTHERS": 2.0}.items():
        monkeypatch.setattr(f"colibri.lab.forecast.probes.{name}", value)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real checkpoint."""
    directory = tmp_path_factory.mktemp("cli") / "tiny"
    tool = str(ROOT / "tools" / "make_checkpoint.py")
    subprocess.run(
        [sys.executable, tool, str(directory), "--shape", "tiny"], check=True, capture_output=True
    )
    return directory


@pytest.fixture(scope="session")
def spawn() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs the command as a process of its own, with no terminal and no stdin."""

    def run(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "colibri.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **options,
        )

    return run
