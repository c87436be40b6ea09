"""Markdown as a terminal shows it."""

from __future__ import annotations

from typing import ClassVar

from rich import markdown
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, MarkdownElement


class LeftHeading(Heading):
    """A heading that stands at the left, as all else does."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class Markdown(markdown.Markdown):
    """Rich's markdown with headings at the left."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **markdown.Markdown.elements,
        "heading_open": LeftHeading,
    }
