"""Colibri runs Mixture-of-Experts language models that are larger than the machine's memory.

from colibri import LLM

with LLM.open("my-model", expert_slots="25%") as llm:
print(llm.generate("The hummingbird is", max_tokens=8).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colibri.llm import LLM, Chunk, Completion
    from colibri.settings import Settings

__all__ = ["LLM", "Chunk", "Completion", "Settings", "__version__"]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: `import colibri` itself loads nothing."""
    if name in ("LLM", "Chunk", "Completion"):
        from colibri import llm

        return getattr(llm, name)
    if name == "Settings":
        from colibri.settings import Settings

        return Settings
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'colibri' has no attribute {name!r}")


def _version() -> str:
    try:
        from colibri._build import VERSION
    except ImportError:  # a source tree that was never built
        return "0+unbuilt"
    return str(VERSION)
