"""The checkpoint that disk figures are measured on: the one that is named, else one made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from colibri.checkpoint.container_manifest import MANIFEST
from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from colibri.models.generate import generate, shape_config
from colibri.models.registry import all_families
from colibri.settings import Settings

Progress = Callable[[str, int, int], None]  # stage, done, total
SHAPE, EXPERTS, DENSE = "olmoe-7b", "int4-g64", "int8-g64"
HUB_FORMAT, HUB_LAYERS = "bf16", 4
_DONE = ".complete"


def with_model(settings: Settings, progress: Progress) -> Settings:
    """The settings with a model, which is made in the cache directory if none is named.

    Raises:
        CheckpointError: the disk is too small.
    """
    if settings.model is not None:
        return settings
    directory = settings.cache / "models" / f"{SHAPE}-{EXPERTS}"
    if not (directory / MANIFEST).is_file():
        config = shape_config(family_for(SHAPE), SHAPE)
        stage = f"making {directory}"
        generate(
            directory,
            config,
            experts=EXPERTS,
            dense=DENSE,
            progress=lambda done, total: progress(stage, done, total),
        )
    return replace(settings, model=str(directory))


def hub_model(settings: Settings, progress: Progress, shape: str = SHAPE) -> Settings:
    """The settings with files as a hub has them, made once: fewer layers, in 16 bits.

    Raises:
        CheckpointError: the disk is too small, or a run that made them was killed.
    """
    directory = settings.cache / "models" / f"{shape}-{HUB_FORMAT}"
    if not (directory / _DONE).is_file():
        layers = None if shape == "tiny" else HUB_LAYERS
        config = shape_config(family_for(shape), shape, layers)
        stage = f"making {directory}"
        _clear(directory)
        generate(
            directory,
            config,
            experts=HUB_FORMAT,
            progress=lambda done, total: progress(stage, done, total),
        )
        (directory / _DONE).touch()
    return replace(settings, model=str(directory))


def _clear(directory: Path) -> None:
    """Take away what a run that was killed has left; nobody else writes there."""
    if directory.is_dir():
        for path in directory.iterdir():
            path.unlink()


def family_for(shape: str) -> Family:
    """The family that a shape is named for, else the first that has routed experts."""
    families = all_families()
    named = [family for family in families if shape.startswith(f"{family.model_type}-")]
    return named[0] if named else next(f for f in families if _is_sparse(f))


def _is_sparse(family: Family) -> bool:
    return bool(Blueprint.of(family.tiny_config()).sparse_layers())
