"""What the engine needs of a model and of its attention state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from colibri.kernels.api import Batch, Routing

Cancelled = Callable[[], bool]
Progress = Callable[[int, int], None]  # done, total
Routes = Callable[[int, Routing], None]  # layer, routing


class SequenceState(Protocol):
    """What one sequence keeps: blocks borrowed from the pool, and a cell of recurrent state."""

    @property
    def table(self) -> NDArray[np.int32]:
        """Blocks that hold positions 0-63, 64-127, …; -1 = none yet."""

    @property
    def cell(self) -> int:
        """The cell of its recurrent state, -1 where there is none."""

    @property
    def is_recurrent(self) -> bool:
        """Whether the state can go back to snapshots only."""

    def reserve(self, length: int) -> None:
        """Borrow blocks for positions below `length`."""

    def snapshot(self) -> None:
        """Remember the state as it is, where it can go back to snapshots only."""

    def truncate(self, length: int) -> int:
        """Forget positions from `length` on; return how many remain, fewer if it must go back."""

    def close(self) -> None:
        """Give back everything."""


class ForwardModel(Protocol):
    """A model as a function from token ids to logits."""

    def forward(
        self,
        ids: NDArray[np.int32],
        batch: Batch,
        wanted: NDArray[np.int32],
        *,
        cancelled: Cancelled | None = None,
        routes: Routes | None = None,
    ) -> NDArray[np.float32]:
        """Run `ids [T]` and return the logits `[R, V]` of the rows `wanted [R]`.

        Raises:
            Cancelled: `cancelled()` was true between two layers.
        """
