"""What the files under deploy/ say is what the program knows."""

import re

from colibri.server.app import PATHS
from colibri.settings import Settings, flag_of, variable_of
from tests.architecture.sources import ROOT

DEPLOY = ROOT / "deploy"


def test_variables_and_flags_are_known() -> None:
    known = {variable_of(name) for name in Settings.names()}
    flags = {flag_of(name) for name in Settings.names_for("serve")}
    for path in DEPLOY.iterdir():
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"COLIBRI_[A-Z_]+", text)) <= known, path
        if path.suffix == ".yaml":
            assert set(re.findall(r'"(--[a-z-]+)"', text)) <= flags, path


def test_every_path_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "SERVER.md").read_text(encoding="utf-8")
    for path in (each.path for each in PATHS):
        assert f"`{path.replace('{name:path}', 'NAME')}`" in text or f" {path}`" in text, path
