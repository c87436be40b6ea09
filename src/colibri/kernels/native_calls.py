"""What every group of native operations is made of: the call, its errors, pointers to arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri.formats import Bytes, Floats
from colibri.kernels.api import Batch, Ints, NonFiniteRow, RopeTable, SlotFailed
from colibri.kernels.library import Library
from colibri.kernels.native_structs import Structs, address_of


class NativeCalls:
    """The base of `NativeKernels`, which fills the attributes."""

    _library: Library
    _structs: Structs
    _context: Any
    _workspace: Bytes
    # Structs of the step at hand: its layers share a batch, and those that rotate alike a table.
    _batch: Batch | None = None
    _batches: dict[tuple[int, int, int], tuple[RopeTable, Any]]

    def _do(self, function: str, *arguments: Any) -> None:
        """Call until done. Between calls that say AGAIN Python sees signals, so Ctrl-C works."""
        lib, call = self._library.lib, getattr(self._library.lib, function)
        code = call(self._context, *arguments)
        while code == lib.COLIBRI_AGAIN:
            code = call(self._context, *arguments)
        if code != lib.COLIBRI_OK:
            raise self._error(function, code)

    def _error(self, function: str, code: int) -> Exception:
        lib, where = self._library.lib, self._context.where
        if code == lib.COLIBRI_FAILED:
            return SlotFailed(where)
        if code == lib.COLIBRI_NONFINITE:
            return NonFiniteRow(where)
        if code == lib.COLIBRI_WORKSPACE:
            size = self._workspace.size
            return ValueError(f"{function}: the step needs more than the {size} bytes reserved")
        return ValueError(
            f"{function}: an id, position, block or slot is out of range (at {where})"
        )

    def _floats(self, array: Floats, shape: tuple[int, ...], what: str) -> Any:
        return address_of(self._library, array, np.float32, "float[]", shape, what)

    def _ints(self, array: Ints, shape: tuple[int, ...], what: str) -> Any:
        return address_of(self._library, array, np.int32, "int32_t[]", shape, what)

    def _out(self, array: Floats) -> Any:
        return self._library.ffi.from_buffer("float[]", array)

    def _batch_of(self, batch: Batch, rope: RopeTable, half: int, width: int = 0) -> Any:
        """`colibri_batch *` for layers of that width and `half` rotated pairs, made once a step."""
        if self._batch is not batch:
            self._batch, self._batches = batch, {}
        key = id(rope), half, width
        found = self._batches.get(key)
        if found is None:
            found = self._batches[key] = rope, self._new_batch(batch, rope, half, width)
        return found[1]

    def _new_batch(self, batch: Batch, rope: RopeTable, half: int, width: int) -> Any:
        rows, tables = len(batch.positions), batch.block_tables
        values = {
            "rows": rows,
            "hidden_size": width,
            "num_members": tables.shape[0],
            "table_width": tables.shape[1],
            "positions": self._ints(batch.positions, (rows,), "positions"),
            "members": self._ints(batch.members, (rows,), "members"),
            "block_tables": self._ints(tables, (-1, -1), "block_tables"),
            "cos": self._floats(rope.cos, (rows, half), "cos"),
            "sin": self._floats(rope.sin, (rows, half), "sin"),
        }
        return self._library.ffi.new("colibri_batch *", values)
