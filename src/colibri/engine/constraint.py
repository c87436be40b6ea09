"""What restricts a reply to a language, token by token; it runs where the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

ConstraintSpec: TypeAlias = Mapping[str, Any]  # for instance {"json_schema": {...}}


class Constraint(Protocol):
    """The state of one reply in its language. Nothing of the prompt is shown to it."""

    def mask(self) -> NDArray[np.bool_]:
        """`[V]` which ids may come next; at least one may.

        The ids that end a turn are among them where the reply may end here.
        """

    def accept(self, token: int) -> None:
        """`token` comes next; it was allowed, by `mask` or by `forced`."""

    def forced(self) -> Sequence[int]:
        """Ids that must follow now, as far as that is known without the model; often none.

        The engine accepts each, and writes them to the cache in one pass.
        """

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow: the reply ends here, without an end-of-turn id."""


ConstraintFactory: TypeAlias = Callable[[ConstraintSpec], Constraint]
"""Builds the constraint of one reply, or raises RequestError naming what it does not honour.

It is asked when a request arrives, once for each choice, between two passes: compiling must be
quick, or cached.
"""
