"""What sequences keep: a pool of blocks and cells, and the state of one sequence."""

from colibri.kv.pool import KVPool, LayerState
from colibri.kv.shape import KVFormat, Plane, StateShape, block_nbytes, cell_nbytes
from colibri.kv.state import MOST_SNAPSHOTS, KVState

__all__ = [
    "MOST_SNAPSHOTS",
    "KVFormat",
    "KVPool",
    "KVState",
    "LayerState",
    "Plane",
    "StateShape",
    "block_nbytes",
    "cell_nbytes",
]
