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
    isa: str = "auto",
) -> Kernels:
    """The kernels of that name; "auto" is native where the library is there, else the reference.

    `threads` None means the CPUs this process may use, `isa` "auto" the fastest instruction set
    that runs here. The reference has neither threads nor instruction sets nor coded activations: it
    always computes in float32.

    Raises:
        NativeLibraryError: "native" was asked for and there is no usable library.
        SettingsError: no such kernels or activations, an instruction set that does not run here,
            or one for the reference.
    """
    if name not in ("auto", "native", "reference"):
        raise SettingsError(f"unknown kernels {name!r}: known are auto, native, reference")
    try:
        coding = Activations(activations)
    except ValueError:
        known = ", ".join(Activations)
        raise SettingsError(f"unknown activations {activations!r}: known are {known}") from None
    reason = "the reference was asked for" if name == "reference" else why_reference()
    if reason is None:
        chosen = None if isa == "auto" else isa
        return NativeKernels(threads=threads, activations=coding, isa=chosen)
    if name == "native":
        raise NativeLibraryError(f"native kernels were asked for, but {reason}")
    if isa != "auto":
        raise SettingsError(f"isa is {isa!r}, which is for native kernels only, but {reason}")
    return ReferenceKernels()


def why_reference() -> str | None:
    """Why "auto" means the slow NumPy reference here, or None where it means native code."""
    return library.unavailable_reason()
