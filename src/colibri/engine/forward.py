"""What the engine needs of a model and of its attention state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from colibri.kernels.api import Batch, Routing

Cancelled = Callable[[], bool]
Progress = Callable[[int, int], None]  # done, total
Routes = Callable[[int, Routing], None]  # layer, routing
Leaving: TypeAlias = Callable[[], Sequence[int]]  # members of a batch that left since it was asked


# ids [T], batch, tokens that follow each row [T, heads] -> logits [T, V] of each drafting head
Draft = Callable[[NDArray[np.int32], Batch, NDArray[np.int32]], list[NDArray[np.float32]]]


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
        """Whether the state can go back to snapshots only, or by `slack` positions."""

    @property
    def slack(self) -> int:
        """Positions by which a recurrent state can be cut."""

    def missing(self, length: int) -> tuple[int, int]:
        """Blocks, and cells, that `reserve(length)` would take."""

    def reserve(self, length: int) -> None:
        """Borrow blocks for positions below `length`."""

    def snapshot(self, length: int | None = None, *, lasting: bool = False) -> None:
        """Remember the state as it is, or was at `length`, where it goes back to snapshots only."""

    def forget_snapshot(self) -> bool:
        """Give the cell of the oldest snapshot back; False where there is none."""

    def seal(self) -> None:
        """What its cell holds was written by others: it stands for its own length alone."""

    def truncate(self, length: int) -> int:
        """Forget positions from `length` on; return how many remain, fewer if it must go back."""

    def reachable(self, length: int) -> int:
        """How many of the first `length` positions another sequence can begin with."""

    def fork(self, length: int) -> Self:
        """Another sequence with the first `reachable(length)` positions; raises BudgetError."""

    def block(self, index: int) -> NDArray[np.uint8]:
        """What is kept of positions `64 * index` to `64 * index + 63`, to read and write."""

    def cells(self) -> Mapping[int, NDArray[np.uint8] | None]:
        """The lengths that the state can go on from exactly, and its cell there, if it has one."""

    def close(self) -> None:
        """Give back everything."""


class StatePool(Protocol):
    """Where attention state is borrowed."""

    @property
    def num_blocks(self) -> int:
        """All blocks, each of 64 positions."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""

    @property
    def num_free_cells(self) -> int:
        """Cells of recurrent state that nobody holds; 0 for models without."""

    def open_state(self) -> SequenceState:
        """An empty sequence."""


class ForwardModel(Protocol):
    """A model as a function from token ids to logits."""

    def forward(
        self,
        ids: NDArray[np.int32],
        batch: Batch,
        wanted: NDArray[np.int32],
        *,
        leaving: Leaving | None = None,
        routes: Routes | None = None,
    ) -> NDArray[np.float32]:
        """Run `ids [T]` and return the logits `[R, V]` of the rows `wanted [R]`.

        `leaving` is asked between layers; rows of members that left have no logits.

        Raises:
            Cancelled: all members left.
            NumericsError, ReadError: naming the `members` they concern, where that is known.
        """
