"""Touching slots ahead of the reader, on a thread of the library (native/touch.c).

The first touch of memory runs at 0.3 to 7 GB/s, by whether the machine below has it at hand. A read
that has to wait for it may take five times as long, so it is done before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri.formats import Bytes
from colibri.kernels.library import Library
from colibri.memory.forked import LIVING

_log = logging.getLogger(__name__)


class Toucher:
    """Makes usable slots resident, in ascending order, while others compute and read."""

    def __init__(
        self,
        library: Library,
        data: Bytes,
        bounds: NDArray[np.int64],
        usable: NDArray[np.bool_],
        touched: NDArray[np.bool_],
    ) -> None:
        """Begin; `bounds [num_slots + 1]` is where slots start in `data`, `touched` is updated.

        Without a thread records take what they need, which is only slower.
        """
        ffi, self._lib = library.ffi, library.lib
        self._guard = threading.Lock()  # nobody is in the library while the handle is freed
        keep = (
            ffi.from_buffer("uint8_t[]", data),
            ffi.from_buffer("int64_t[]", bounds),
            ffi.from_buffer("uint8_t[]", usable.view(np.uint8)),
            ffi.from_buffer("uint8_t[]", touched.view(np.uint8)),
        )
        handle = self._lib.colibri_toucher_create(*keep, len(touched))
        self._handle: Any = None if handle == ffi.NULL else handle
        if self._handle is None:
            _log.info("slots are not touched ahead: no thread (%s)", os.strerror(ffi.errno))
            return
        self._end = weakref.finalize(self, _end, self._lib, handle, keep)
        LIVING.add(self)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is being touched in this block, nor begun."""
        with self._guard:
            handle = self._handle
            if handle is not None:
                self._lib.colibri_toucher_hold(handle)
            try:
                yield
            finally:
                if handle is not None:
                    self._lib.colibri_toucher_resume(handle)

    def close(self) -> None:
        """End the thread; closing twice is fine."""
        LIVING.discard(self)
        with self._guard:
            if self._handle is not None:
                self._handle = None
                self._end()

    def abandon(self) -> None:
        """In a forked child, where there is no such thread; see `Abandonable`."""
        self._guard = threading.Lock()
        self._end.detach()
        self._handle = None


def _end(lib: Any, handle: Any, _keep: tuple[Any, ...]) -> None:
    lib.colibri_toucher_close(handle)
