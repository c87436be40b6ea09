"""The operations that layers are made of: the protocol, a NumPy reference, and native code."""

from __future__ import annotations

from colibri.kernels.dispatch import make_kernels, why_reference

__all__ = ["make_kernels", "why_reference"]
