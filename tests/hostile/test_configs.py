"""Damaged configs of every family: a typed refusal or a model, soon, and never a traceback."""

from typing import Any

from colibri.errors import ColibriError
from colibri.models.blueprint import Blueprint
from colibri.models.family import Family
from tests.tiny import each_family

HUGE = 1 << 62


def understand(config: dict[str, Any]) -> bool:
    """Whether a config is taken; all that is asked of one before files are opened."""
    try:
        found = Blueprint.of(config)
        found.parameters()
        found.expert_layers()
        found.states(found.config.max_position_embeddings)
        found.limits(8)
    except ColibriError:
        return False
    return True


@each_family
def test_a_key_that_is_missing_or_absurd(family: Family) -> None:
    whole = family.tiny_config()
    assert understand(whole)
    for key, value in whole.items():
        understand({other: kept for other, kept in whole.items() if other != key})
        if isinstance(value, int | float) and not isinstance(value, bool):
            understand({**whole, key: HUGE})
            assert not understand({**whole, key: ["x"]}) or key.endswith("_token_id")
        elif isinstance(value, list):
            understand({**whole, key: [HUGE]})
