"""The facade: joins engine and text behind `LLM`."""

from colibri.llm.completion import Chunk, Completion, Stream
from colibri.llm.facade import LLM

__all__ = ["LLM", "Chunk", "Completion", "Stream"]
