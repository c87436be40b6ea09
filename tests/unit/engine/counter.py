"""A model whose replies are known in advance, and the attention state it needs."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from colibri.engine.engine import Engine, EngineLimits
from colibri.engine.forward import Cancelled, Routes
from colibri.engine.metrics import ExpertCounts
from colibri.errors import Cancelled as CancelledError
from colibri.kernels.api import KV_BLOCK, Batch

VOCAB = 512
NUM_LAYERS = 3


class FakeState:
    """Blocks of a fake pool."""

    def __init__(self, free: list[int]) -> None:
        self._free = free
        self.table = np.zeros(0, np.int32)
        self.closed = False

    def reserve(self, length: int) -> None:
        while len(self.table) * KV_BLOCK < length:
            self.table = np.append(self.table, np.int32(self._free.pop()))

    cell = -1
    is_recurrent = False

    def snapshot(self) -> None:
        raise AssertionError("blocks can be cut anywhere")

    def truncate(self, length: int) -> int:
        kept = -(-length // KV_BLOCK)
        self._free.extend(int(block) for block in self.table[kept:])
        self.table = self.table[:kept]
        return length

    def close(self) -> None:
        self.truncate(0)
        self.closed = True


class CounterModel:
    """Prefers last id + 1, wrapping at the end.

    The other logits are a hash of every id before, read back from the blocks: whoever forgets to
    reserve, to rewind or to write sees other tokens when it samples.

    Attributes:
        passes: tokens of each forward pass.
        follow: which token the model prefers after these.
        before_layer: called with the pass and the layer; tests cancel or fail in it.
    """

    def __init__(self, num_blocks: int = 16) -> None:
        self.blocks = np.full((num_blocks, KV_BLOCK), -1, np.int32)
        self.free = list(range(num_blocks))
        self.states: list[FakeState] = []
        self.passes: list[int] = []
        self.follow: Callable[[Sequence[int]], int] = lambda history: (history[-1] + 1) % VOCAB
        self.before_layer: Callable[[int, int], None] = lambda _pass, _layer: None

    def open_state(self) -> FakeState:
        self.states.append(FakeState(self.free))
        return self.states[-1]

    def forward(
        self,
        ids: NDArray[np.int32],
        batch: Batch,
        wanted: NDArray[np.int32],
        *,
        cancelled: Cancelled | None = None,
        routes: Routes | None = None,
    ) -> NDArray[np.float32]:
        assert ids.dtype == wanted.dtype == batch.positions.dtype == np.int32
        self.passes.append(len(ids))
        for layer in range(NUM_LAYERS):
            self.before_layer(len(self.passes), layer)
            if cancelled is not None and cancelled():
                raise CancelledError("cancelled")
        table = batch.block_tables[0]
        self.blocks[table[batch.positions // KV_BLOCK], batch.positions % KV_BLOCK] = ids
        rows = [self._row(table, int(batch.positions[row])) for row in wanted]
        return np.asarray(rows, np.float32).reshape(len(wanted), VOCAB)

    def _row(self, table: NDArray[np.int32], position: int) -> NDArray[np.float32]:
        history = self.blocks[table].reshape(-1)[: position + 1]
        assert (history >= 0).all()
        seed = hash(tuple(int(token) for token in history)) % 2**32
        row = np.random.RandomState(seed).standard_normal(VOCAB).astype(np.float32)
        row[self.follow(history.tolist())] = 6.0
        return row


def make_engine(
    model: CounterModel,
    *,
    context_length: int = 128,
    prefill_chunk: int = 16,
    eos_ids: frozenset[int] = frozenset(),
) -> Engine:
    """An engine whose every pass asks for three experts and misses one of them."""

    def counts() -> ExpertCounts:
        n = len(model.passes)
        return ExpertCounts(requests=3 * n, hits=2 * n, misses=n, bytes_read=4096 * n)

    limits = EngineLimits(
        vocab_size=VOCAB,
        context_length=context_length,
        prefill_chunk=prefill_chunk,
        eos_ids=eos_ids,
        ram_budget_bytes=2**40,
    )
    return Engine(model, model.open_state, counts, limits)
