"""What every group of native operations is made of: the call, its errors, pointers to arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri.formats import Bytes, Floats
from colibri.kernels.api import Ints, NonFiniteRow, SlotFailed
from colibri.kernels.library import Library
from colibri.kernels.native_structs import Structs, address_of


class NativeCalls:
    """The base of `NativeKernels`, which fills the attributes."""

    _library: Library
    _structs: Structs
    _context: Any
    _workspace: Bytes

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
