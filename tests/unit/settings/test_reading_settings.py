"""Settings of reading experts."""

import os
from pathlib import Path

import pytest

from colibri.errors import SettingsError
from colibri.memory.reader_config import ReaderConfig
from colibri.settings import Settings


def test_the_reader_gets_what_is_set() -> None:
    settings = Settings.resolve(
        {"COLIBRI_MIRROR": os.pathsep.join(["/a", "b"]), "COLIBRI_VERIFY_READS": "false"},
        reader_threads=3,
        read_block="1MiB",
        cache_dir="/c",
    )
    assert settings.reader == ReaderConfig(
        threads=3,
        block=1 << 20,
        verify=False,
        mirrors=(Path("/a"), Path("b")),
        cache=Path("/c"),
    )
    assert settings.as_dict()["mirror"] == ("/a", "b")


@pytest.mark.parametrize(
    ("given", "expected"), [("/a", ("/a",)), (["/a", "/b"], ("/a", "/b")), (Path("/a"), ("/a",))]
)
def test_mirrors_in_every_form(given: object, expected: tuple[str, ...]) -> None:
    assert Settings.resolve({}, mirror=given).mirror == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("mirror", []), ("mirror", ""), ("mirror", 3), ("read_block", "much"), ("read_block", False)],
)
def test_what_makes_no_sense_is_refused(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"^{name}"):
        Settings.resolve({}, **{name: value})


def test_blocks_may_be_off() -> None:
    assert [Settings.resolve({}, read_block=x).read_block for x in (0, "0", "4KiB")] == [0, 0, 4096]


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert Settings.resolve({}).cache == Path("/x/colibri")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert Settings.resolve({}).cache == Path.home() / ".cache/colibri"
