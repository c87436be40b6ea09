"""Keys and values: a pool of blocks, and the state of one sequence."""

from colibri.kv.pool import KVPool, KVShape, block_nbytes
from colibri.kv.state import KVState

__all__ = ["KVPool", "KVShape", "KVState", "block_nbytes"]
