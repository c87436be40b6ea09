"""Families are found by file, and an unknown one is answered with the nearest name."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import colibri.models
from colibri.errors import ConfigError, UnsupportedModelError
from colibri.models import registry
from colibri.models.family import Family
from colibri.models.registry import all_families, family_of, get_family
from tests.tiny import each_family

FAMILIES = all_families()
NAMES = {name for family in FAMILIES for name in (family.model_type, *family.aliases)}


def test_every_family_file_is_found() -> None:
    folder = Path(next(iter(colibri.models.__path__)))
    files = [p.stem for p in sorted(folder.glob("*.py")) if "FAMILY = " in p.read_text()]
    assert [family.model_type for family in FAMILIES] == files
    assert len(files) >= 4


def test_names_are_unique() -> None:
    assert len(NAMES) == sum(1 + len(family.aliases) for family in FAMILIES)


@each_family
def test_by_name(family: Family) -> None:
    assert get_family(family.model_type) is family
    assert family_of({"model_type": family.model_type}) is family
    assert all(get_family(alias) is family for alias in family.aliases)


@each_family
def test_did_you_mean(family: Family) -> None:
    typo = "x" + family.model_type
    with pytest.raises(UnsupportedModelError) as refusal:
        get_family(typo)
    message = str(refusal.value)
    assert f"model_type {typo!r} is unknown" in message
    assert f"did you mean {family.model_type!r}?" in message
    assert all(name in message for name in NAMES)


@given(st.text(max_size=30).filter(lambda name: name not in NAMES))
def test_no_other_name_is_known(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="is unknown"):
        get_family(name)


def test_nothing_near_suggests_nothing() -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        get_family("###")
    assert "did you mean" not in str(refusal.value)


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ["a"]}], ids=str)
def test_a_config_without_a_name(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="model_type must be a string"):
        family_of(config)


def test_an_alias_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first = FAMILIES[0]
    other = Family(
        model_type="another", config=first.config, layer=first.layer, aliases=("also_another",)
    )
    monkeypatch.setattr(registry, "all_families", lambda: (other,))
    assert get_family("another") is get_family("also_another") is other
    with pytest.raises(UnsupportedModelError, match="known are also_another, another"):
        get_family(first.model_type)
