"""Which model the settings mean; nothing is opened, and nothing heavy imported."""

from __future__ import annotations

from pathlib import Path

from colibri.checkpoint.hub.names import RepoName, snapshot_of
from colibri.errors import IncompleteModelError, SettingsError
from colibri.settings import Settings

BUNDLED = Path(__file__).parents[1] / "bundled"


def uses_bundled(settings: Settings) -> bool:
    """Whether no model is named and one came with the package."""
    return settings.model is None and (BUNDLED / "config.json").is_file()


def find_model(settings: Settings) -> Path:
    """The checkpoint that the settings name, else the one that comes with the package.

    Raises:
        SettingsError: none is named and none came along.
        IncompleteModelError: see `locate`.
    """
    if settings.model is not None:
        return locate(settings.model)
    if uses_bundled(settings):
        return BUNDLED
    raise SettingsError(
        "no model is named, and none came with this installation: name a checkpoint's directory "
        "(--model, or COLIBRI_MODEL), pull one with `coli pull OWNER/NAME`, or make one with "
        "`python tools/make_checkpoint.py my-model`"
    )


def locate(model: str) -> Path:
    """Where a model is that is named by its path or, as `OWNER/NAME[@REVISION]`, by its repository.

    Raises:
        IncompleteModelError: no such path, and no such repository in the shared cache.
    """
    path, name = Path(model), RepoName.parse(model)
    if name is None or path.exists():
        return path
    found = snapshot_of(name)
    if found is None:
        raise IncompleteModelError(
            f"{model}: neither a directory here nor a repository in the cache: fetch it with "
            f"`coli pull {model}`, or name a directory"
        )
    return found
