"""Names in messages as they were typed: a flag, or a variable."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from colibri.settings import Settings, flag_of, variable_of

Spell = Callable[[str], str]


def flag(name: str) -> str:
    """The flag of a setting or a sampling parameter."""
    return flag_of("stop_id" if name == "stop_ids" else name)


def speller(known: Collection[str], given: Collection[str] = ()) -> Spell:
    """Rewrites names of settings and parameters in a message.

    Args:
        known: names that the command has flags for.
        given: those that were given as flags; what is in the environment and not among them is
            written as variable, and all the rest as flag.
    """
    variables = Settings.names_in_environment() - set(given)
    spelled = {*known, *variables}
    names = "|".join(sorted(spelled, key=len, reverse=True)) or "(?!)"
    # A word such as `ram` is a name at the beginning, after a verb of advice, and in backticks.
    pattern = re.compile(
        rf"(?:^|(?<=raise )|(?<=lower )|(?<=set )|(?<=leave ))({names})(?=$|[\s:,;)])"
        rf"|`({names})`"
        r"|(?<![\w./'-])([a-z]+(?:_[a-z]+)+)(?![\w./'-])"
    )

    def written(match: re.Match[str]) -> str:
        name = next(group for group in match.groups() if group is not None)
        if name not in spelled:
            return match[0]
        return variable_of(name) if name in variables else flag(name)

    return lambda message: pattern.sub(written, message)
