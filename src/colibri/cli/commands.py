"""Commands that are imported when they are called, so that help and versions come at once."""

from __future__ import annotations

from typing import Any, cast

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

HELP_FLAGS = {"help_option_names": ["-h", "--help"]}

OTHER_PANEL = "Other"

SUMMARIES = {
    "run": "Continue a prompt.",
    "chat": "Talk to a model.",
    "serve": "Serve a model over HTTP: OpenAI's, Anthropic's and Ollama's APIs.",
    "info": "Show what a checkpoint is.",
    "plan": "Show how the memory budget would be divided, and how fast that will be.",
    "pull": "Fetch a model from the hub, or say what it would do here.",
    "list": "Show the models in the shared cache.",
    "rm": "Take a model out of the shared cache.",
    "convert": "Rewrite a checkpoint so that one expert is one aligned read.",
    "verify": "Check every file of a model: names, shapes and sizes; with --deep contents too.",
    "sim": "Replay traces against eviction policies: learn on first halves, score on second "
    "halves.",
    "doctor": "Examine this machine and a model: what works, what is slow, and what mends it.",
    "top": "Watch a running server: speed, hits, reads, conversations and memory.",
    "eval": "Measure what a model, or a setting, is worth.",
    "bench": "Measure, and print the ceilings beside it.",
    "mirror": "Keep copies of experts on other drives, so that more than one drive is read at "
    "once.",
}
"""Each is the first paragraph of its command's own help; a test holds them together."""


def _without_type(option: Any) -> Any:
    """`--help` is a flag: the help shows no type for it, and shows it last."""
    if option is not None:
        option.metavar, option.rich_help_panel = "", OTHER_PANEL
    return option


class Command(TyperCommand):
    """A command whose flags and arguments show no type in the help."""

    def get_help_option(self, ctx: Any) -> Any:
        """`--help`."""
        return _without_type(super().get_help_option(ctx))

    def get_params(self, ctx: Any) -> Any:
        """All parameters; what an argument is, its help says."""
        found = super().get_params(ctx)
        for parameter in found:
            if isinstance(parameter, TyperArgument):
                vars(parameter)["display_type_rich"] = lambda ctx: None
        return found


class Group(TyperGroup):
    """A group whose flags show no type in the help."""

    def get_help_option(self, ctx: Any) -> Any:
        """`--help`."""
        return _without_type(super().get_help_option(ctx))


class LazyGroup(Group):
    """The root: knows names and summaries, and imports `colibri.cli.NAME` when it is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {n: TyperCommand(n, help=text) for n, text in SUMMARIES.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the command itself in the place of its summary."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if name is None or command is None else load(name), rest


def load(name: str) -> TyperCommand | TyperGroup:
    """Import a command."""
    found = _imported(name)
    if isinstance(found, typer.Typer):
        return cast(TyperGroup, typer.main.get_command(found))
    app = new_app()
    # `run` tells itself what is wrong with more than one prompt.
    app.command(name, cls=Command, context_settings={"allow_extra_args": name == "run"})(found)
    return cast(TyperCommand, typer.main.get_command(app))


def _imported(name: str) -> Any:
    match name:
        case "run":
            from colibri.cli.run import run as found
        case "chat":
            from colibri.cli.chat import chat as found
        case "serve":
            from colibri.cli.serve import serve as found
        case "info":
            from colibri.cli.info import info as found
        case "plan":
            from colibri.cli.plan import plan as found
        case "pull":
            from colibri.cli.pull import pull as found
        case "list":
            from colibri.cli.cached import list_models as found
        case "rm":
            from colibri.cli.cached import remove_model as found
        case "convert":
            from colibri.cli.convert import convert as found
        case "verify":
            from colibri.cli.verify import verify as found
        case "sim":
            from colibri.cli.sim import sim as found
        case "doctor":
            from colibri.cli.doctor import doctor as found
        case "top":
            from colibri.cli.top import top as found
        case "eval":
            from colibri.cli.eval import app as found
        case "bench":
            from colibri.cli.bench import app as found
        case _:
            from colibri.cli.mirror import app as found
    return found


def new_app(**options: Any) -> typer.Typer:
    """A group with the looks that all share."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings=HELP_FLAGS,
        **{"cls": Group, **options},
    )
