"""What sequences keep: a pool of blocks and cells, and the state of one sequence."""

from colibri.kv.pool import KVPool, LayerState
from colibri.kv.shape import KVFormat, Plane, StateShape, block_nbytes, cell_nbytes
from colibri.kv.state import KVState

__all__ = [
    "KVFormat",
    "KVPool",
    "KVState",
    "LayerState",
    "Plane",
    "StateShape",
    "block_nbytes",
    "cell_nbytes",
]
