import importlib
import sys
from types import ModuleType

import pytest

import colibri


def build(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    module = ModuleType("colibri._build")
    module.WHY_NO_NATIVE, module.VERSION = why, "1.2.3"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "colibri._build", module)


def test_importing_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build(monkeypatch, "no C compiler was found")
    importlib.reload(colibri)
    assert caplog.messages == []


def test_the_version_is_that_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, "")
    assert colibri.__version__ == "1.2.3"


def test_every_public_name_is_there() -> None:
    assert all(getattr(colibri, name) for name in colibri.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = colibri.LMM
