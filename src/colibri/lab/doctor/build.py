"""Python, the native kernels and the packages below."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import colibri
from colibri.errors import ColibriError
from colibri.kernels import why_reference
from colibri.kernels.native import NativeKernels
from colibri.lab.doctor.finding import Finding, fault, fine, slow
from colibri.llm.loading import make_kernels
from colibri.settings import Settings

_LEAST_PYTHON = (3, 11)
_PACKAGES = ("numpy", "tokenizers", "llguidance", "starlette", "uvicorn", "huggingface-hub")


def build_findings(settings: Settings) -> Iterator[Finding]:
    """All checks of this module."""
    yield check_python()
    yield check_kernels(settings)


def check_python(found: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """The interpreter, and what is installed in it."""
    shown = ".".join(map(str, found))
    facts = {"python": shown, "colibri": colibri.__version__, "packages": _versions()}
    if found < _LEAST_PYTHON:
        wanted = ".".join(map(str, _LEAST_PYTHON))
        return fault(
            "python", shown, f"it is too old: {wanted} is needed", f"install Python {wanted}"
        )
    implementation = platform.python_implementation()
    return fine("python", f"{implementation} {shown}, colibri {colibri.__version__}", **facts)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def check_kernels(settings: Settings) -> Finding:
    """Whether native kernels are there and run."""
    try:
        kernels = make_kernels(settings)
    except ColibriError as error:
        return fault("kernels", str(error), "nothing can be computed", "install colibri-moe again")
    if isinstance(kernels, NativeKernels):
        return fine(
            "kernels",
            f"native, {kernels.isa}, {kernels.threads} threads",
            isa=kernels.isa,
            threads=kernels.threads,
        )
    why = why_reference() or "the settings ask for the reference"
    return slow(
        "kernels",
        f"the NumPy reference: {why}",
        "it computes hundreds of times slower than native ones",
        "install a C compiler and Python's headers (Debian: apt install gcc python3-dev), then "
        "install colibri-moe again",
        why=why,
    )
