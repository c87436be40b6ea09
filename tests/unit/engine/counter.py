"""A model whose replies are known in advance, over a real pool of attention state."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri.engine.archive import Archive
from colibri.engine.constraint import ConstraintFactory
from colibri.engine.engine import Engine
from colibri.engine.forward import Leaving, Routes
from colibri.engine.limits import EngineLimits
from colibri.engine.metrics import ExpertCounts
from colibri.errors import Cancelled
from colibri.formats import F32
from colibri.kernels.api import KV_BLOCK, Batch
from colibri.kv import KVPool, Plane, StateShape

VOCAB = 512
NUM_LAYERS = 3


class CounterModel:
    """Prefers last id + 1, wrapping at the end.

    The other logits are a hash of every id before, read back from the blocks, or where the model is
    recurrent from a cell: whoever forgets to reserve, to rewind or to write sees other tokens when
    it samples.

    Attributes:
        kv: the pool; a block holds the ids of its positions.
        passes: tokens of each forward pass.
        batches: of each pass, the tokens of each member.
        follow: which token the model prefers after these.
        before_layer: called with the pass and the layer; tests cancel or fail in it.
    """

    def __init__(self, num_blocks: int = 16, *, num_cells: int = 0) -> None:
        shape = StateShape((Plane(1, 1),), 8 if num_cells else 0)
        self.kv = KVPool([shape], num_blocks, F32, num_cells)
        layer = self.kv.layer(0)
        self.blocks = layer.planes[0].pool.view(np.int32).reshape(num_blocks, KV_BLOCK)
        self.blocks[:] = -1
        self.cells = None
        if layer.cells is not None:
            self.cells = layer.cells.pool.view(np.int64).reshape(num_cells, -1)
        self.passes: list[int] = []
        self.batches: list[list[int]] = []
        self.follow: Callable[[Sequence[int]], int] = lambda history: (history[-1] + 1) % VOCAB
        self.before_layer: Callable[[int, int], None] = lambda _pass, _layer: None

    @property
    def free(self) -> list[int]:
        """Numbers of the blocks that nobody holds."""
        return np.flatnonzero(self.kv._owners == 0).tolist()

    def forward(
        self,
        ids: NDArray[np.int32],
        batch: Batch,
        wanted: NDArray[np.int32],
        *,
        leaving: Leaving | None = None,
        routes: Routes | None = None,
    ) -> NDArray[np.float32]:
        assert ids.dtype == wanted.dtype == batch.positions.dtype == np.int32
        self.passes.append(len(ids))
        self.batches.append(np.bincount(batch.members).tolist())
        there = np.ones(len(ids), np.bool_)
        for layer in range(NUM_LAYERS):
            self.before_layer(len(self.passes), layer)
            there &= ~np.isin(batch.members, () if leaving is None else leaving())
            if not there.any():
                raise Cancelled("cancelled")
            self._write(ids, batch, there, NUM_LAYERS - layer)
        rows = [self._row(ids, batch, int(row)) for row in wanted if there[row]]
        return np.asarray(rows, np.float32).reshape(len(rows), VOCAB)

    def _write(
        self, ids: NDArray[np.int32], batch: Batch, there: NDArray[np.bool_], left: int
    ) -> None:
        """The last layer writes the ids; those before write nonsense, as unfinished passes do."""
        members, positions = batch.members[there], batch.positions[there]
        table = batch.block_tables[members, positions // KV_BLOCK]
        self.blocks[table, positions % KV_BLOCK] = ids[there] if left == 1 else -7
        if self.cells is not None and left == NUM_LAYERS:
            # The recurrence has run, whatever becomes of the pass.
            for row in np.flatnonzero(there):
                cell = self.cells[batch.cells[batch.members[row]]]
                cell[0] = hash((int(cell[0]), int(ids[row])))

    def _row(self, ids: NDArray[np.int32], batch: Batch, row: int) -> NDArray[np.float32]:
        member, position = batch.members[row], int(batch.positions[row])
        history = self.blocks[batch.block_tables[member]].reshape(-1)[: position + 1]
        assert (history >= 0).all()
        past = hash(tuple(history.tolist()))
        if self.cells is not None:
            assert self.cells[batch.cells[member], 0] == self.recurrence(history)
        random = np.random.RandomState(past % 2**32)
        logits = random.standard_normal(VOCAB).astype(np.float32)
        logits[self.follow(history.tolist())] = 6.0
        return logits

    @staticmethod
    def recurrence(history: NDArray[np.int32]) -> int:
        """What the cell holds after these ids."""
        state = 0
        for token in history.tolist():
            state = hash((state, token))
        return state


def make_engine(
    model: CounterModel,
    *,
    context_length: int = 128,
    prefill_chunk: int = 16,
    eos_ids: frozenset[int] = frozenset(),
    constraints: ConstraintFactory | None = None,
    clock: Callable[[], float] = perf_counter,
    archive: Archive | None = None,
    **limits: Any,
) -> Engine:
    """An engine whose every pass asks for three experts and misses one of them."""

    def counts() -> ExpertCounts:
        n = len(model.passes)
        return ExpertCounts(requests=3 * n, hits=2 * n, misses=n, bytes_read=4096 * n)

    allowed = EngineLimits(
        vocab_size=VOCAB,
        context_length=context_length,
        prefill_chunk=prefill_chunk,
        eos_ids=eos_ids,
        ram_budget_bytes=2**40,
        **limits,
    )
    return Engine(model, model.kv, counts, allowed, constraints, clock, archive)
