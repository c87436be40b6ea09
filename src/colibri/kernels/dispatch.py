"""Which kernels an engine gets."""

from __future__ import annotations

from typing import Literal

from colibri.errors import NativeLibraryError, SettingsError
from colibri.kernels import library
from colibri.kernels.api import Activations, Kernels
from colibri.kernels.native import NativeKernels
from colibri.kernels.reference import ReferenceKernels

KernelsName = Literal["auto", "native", "reference"]


def make_kernels(
    name: KernelsName = "auto",
    threads: int | None = None,
    activations: Activations | str = Activations.INT16,
) -> Kernels:
    """The kernels of that name; "auto" is native where the library is there, else the reference.

    `threads` None means the CPUs this process may use. The reference has neither threads nor coded
    activations: it always computes in float32.

    Raises:
        NativeLibraryError: "native" was asked for and there is no usable library.
        SettingsError: no such kernels or activations.
    """
    if name not in ("auto", "native", "reference"):
        raise SettingsError(f"unknown kernels {name!r}: known are auto, native, reference")
    try:
        coding = Activations(activations)
    except ValueError:
        known = ", ".join(Activations)
        raise SettingsError(f"unknown activations {activations!r}: known are {known}") from None
    if name == "reference":
        return ReferenceKernels()
    reason = why_reference()
    if reason is None:
        return NativeKernels(threads=threads, activations=coding)
    if name == "native":
        raise NativeLibraryError(f"native kernels were asked for, but {reason}")
    return ReferenceKernels()


def why_reference() -> str | None:
    """Why "auto" means the slow NumPy reference here, or None where it means native code."""
    return library.unavailable_reason()
