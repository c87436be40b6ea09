"""Which model the settings mean; nothing is opened, and nothing heavy imported."""

from __future__ import annotations

from pathlib import Path

from colibri.errors import SettingsError
from colibri.settings import Settings

BUNDLED = Path(__file__).parents[1] / "bundled"


def uses_bundled(settings: Settings) -> bool:
    """Whether no model is named and one came with the package."""
    return settings.model is None and (BUNDLED / "config.json").is_file()


def find_model(settings: Settings) -> Path:
    """The checkpoint that the settings name, else the one that comes with the package.

    Raises:
        SettingsError: none is named and none came along.
    """
    if settings.model is not None:
        return Path(settings.model)
    if uses_bundled(settings):
        return BUNDLED
    raise SettingsError(
        "no model is named, and none came with this installation: name a checkpoint's directory "
        "(--model, or COLIBRI_MODEL), or make one with `python tools/make_checkpoint.py my-model`"
    )
