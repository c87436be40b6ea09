"""What every test may use. Fixtures of one layer live in that layer's folder."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.examples  # noqa: F401  (its profile must be known before the command line is read)
from tests.hub import Hub, serving

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Let child processes import the same `colibri`; keep runs independent of one another."""
    paths = [str(config.rootpath / entry) for entry in config.getini("pythonpath")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["COLIBRI_HEAT"] = "false"  # nothing carries over; tests of heat ask for it


@pytest.fixture(scope="session")
def shared_fixtures() -> Path | None:
    """The large golden models that may lie beside the checkout; None where they do not."""
    folder = ROOT.parent / "shared" / "fixtures"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="module")
def heat_on() -> Iterator[None]:
    """Runs of this module keep and use heat files, as they do for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLIBRI_HEAT", "true")
        yield


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that huggingface_hub takes for the real one, here and in child processes."""
    from huggingface_hub import close_session, constants

    cache, token = str(tmp_path / "cache"), str(tmp_path / "token")
    with serving() as found:
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", token)
        given = {"HF_ENDPOINT": found.url, "HF_HUB_CACHE": cache, "HF_TOKEN_PATH": token}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found
        close_session()
