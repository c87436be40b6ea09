"""What sequences keep: a pool of blocks and cells, and the state of one sequence."""

from colibri.kv.pool import KVPool, LayerState
from colibri.kv.ring import Ring
from colibri.kv.shape import (
    MOST_SNAPSHOTS,
    KVFormat,
    Plane,
    StateShape,
    Window,
    block_nbytes,
    cell_nbytes,
    fills_blocks,
)
from colibri.kv.state import KVState
from colibri.kv.stored import Stored, StoredStates, common_length

__all__ = [
    "MOST_SNAPSHOTS",
    "KVFormat",
    "KVPool",
    "KVState",
    "LayerState",
    "Plane",
    "Ring",
    "StateShape",
    "Stored",
    "StoredStates",
    "Window",
    "block_nbytes",
    "cell_nbytes",
    "common_length",
    "fills_blocks",
]
