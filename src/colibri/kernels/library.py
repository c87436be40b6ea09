"""The kernel library `colibri._native`: is it there, and does it match?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, cast

from colibri.errors import NativeLibraryError

ABI_VERSION = 13  # COLIBRI_ABI_VERSION of native/abi_kernels.cdef


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library: cffi's `ffi` and `lib`."""

    ffi: Any
    lib: Any


@cache
def load() -> Library:
    """The library, loaded once.

    Raises:
        NativeLibraryError: it is missing, broken, or built for another version of this package.
    """
    module = _module()
    if module is None:
        raise NativeLibraryError(f"the kernel library is not there: {unavailable_reason()}")
    found = module.lib.colibri_abi_version()
    if found != ABI_VERSION:
        raise NativeLibraryError(
            f"{module.__file__} has version {found} of the ABI, this package {ABI_VERSION}: "
            "install colibri-moe again (in a checkout: `make native`)"
        )
    return Library(module.ffi, module.lib)


@cache
def unavailable_reason() -> str | None:
    """Why there is no kernel library, or None if there is one."""
    return None if _module() is not None else _why_not_built()


def _module() -> ModuleType | None:
    try:
        import colibri._native as module
    except ModuleNotFoundError as error:
        if error.name != "colibri._native":
            raise
        return None
    except ImportError as error:  # present, but it does not load
        raise NativeLibraryError(
            f"the kernel library cannot be loaded ({error}): install colibri-moe again"
        ) from error
    return cast(ModuleType, module)


def _why_not_built() -> str:
    try:
        from colibri._build import WHY_NO_NATIVE
    except ModuleNotFoundError:
        return "it has not been built (in a checkout: `make native`)"
    return str(WHY_NO_NATIVE) or "it has not been built (in a checkout: `make native`)"
