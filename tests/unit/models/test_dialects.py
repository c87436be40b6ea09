"""Families name dialects that there are."""

from colibri.text.dialects import DIALECTS
from tests.tiny import FAMILIES


def test_dialects_of_families() -> None:
    known = {None, *(dialect.name for dialect in DIALECTS)}
    assert [f.model_type for f in FAMILIES if f.dialect not in known] == []
