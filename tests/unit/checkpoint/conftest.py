"""A container that tests of this layer share."""

from pathlib import Path

import pytest

from tests.unit.checkpoint.containers import write_container


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("container")
    write_container(directory)
    return directory


@pytest.fixture
def container_dir(pristine: Path, tmp_path: Path) -> Path:
    for path in pristine.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path
