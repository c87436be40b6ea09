"""A forked child has the memory of every reader and the threads of none: nothing lands there.

So the child fails what was loading, which turns a wait without end into an error.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Abandonable(Protocol):
    """A reader, as its child process sees it."""

    def abandon(self) -> None:
        """Fail every slot that is LOADING, and accept no more jobs; no thread is left to do it."""


LIVING: weakref.WeakSet[Abandonable] = weakref.WeakSet()  # the readers whose threads run


def _abandon_all() -> None:
    for reader in list(LIVING):
        reader.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
