"""Families are found by the name of their file; nothing has to be registered."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

import colibri.models
from colibri.errors import ConfigError, UnsupportedModelError
from colibri.models.family import Family


@cache
def all_families() -> tuple[Family, ...]:
    """Every family of the package, by name."""
    found = []
    for module in sorted(pkgutil.iter_modules(colibri.models.__path__), key=lambda item: item.name):
        family = getattr(importlib.import_module(f"colibri.models.{module.name}"), "FAMILY", None)
        if isinstance(family, Family):
            found.append(family)
    return tuple(found)


def get_family(model_type: str) -> Family:
    """The family of that `model_type` or alias.

    Raises:
        UnsupportedModelError: unknown; the message suggests the nearest name and lists all.
    """
    names = {
        name: family for family in all_families() for name in (family.model_type, *family.aliases)
    }
    if model_type in names:
        return names[model_type]
    near = difflib.get_close_matches(model_type, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnsupportedModelError(
        f"config.json: model_type {model_type!r} is unknown: {hint}known are "
        f"{', '.join(sorted(names))}; a copy of one of these under another name opens with family "
        "(--family) set to it"
    )


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a (normalised) config.json names.

    Raises:
        ConfigError: there is no `model_type`.
        UnsupportedModelError: it is unknown.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"config.json: model_type must be a string, found {model_type!r}")
    return get_family(model_type)
