"""The facade: joins engine and text behind `LLM`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colibri.llm.completion import Chunk, Completion, Stream
    from colibri.llm.facade import LLM

__all__ = ["LLM", "Chunk", "Completion", "Stream"]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: modules beside the facade stay light without it."""
    if name == "LLM":
        from colibri.llm.facade import LLM

        return LLM
    if name in ("Chunk", "Completion", "Stream"):
        from colibri.llm import completion

        return getattr(completion, name)
    raise AttributeError(f"module 'colibri.llm' has no attribute {name!r}")
