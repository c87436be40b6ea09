"""A hold on experts in their slots, which ends whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from colibri.kernels.api import Ints

Numbers: TypeAlias = NDArray[np.int64]


class Lease:
    """Experts held in their slots until the `with` block ends; gives it their slots `[n]`."""

    __slots__ = ("_acquire", "_pins", "_release")

    def __init__(
        self, acquire: Callable[[list[int]], list[int]], release: Callable[[list[int]], None]
    ) -> None:
        """`acquire` adds what it holds to a list, bit by bit; `release` empties such a list."""
        self._acquire, self._release = acquire, release
        self._pins: list[int] = []

    def __enter__(self) -> Ints:
        try:
            return np.array(self._acquire(self._pins), np.int32)
        except BaseException:
            self._release(self._pins)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release(self._pins)

    def __del__(self) -> None:
        """Ctrl-C between two instructions can keep `__exit__` from running."""
        if self._pins:
            self._release(self._pins)
