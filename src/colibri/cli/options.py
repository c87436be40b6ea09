"""Flags made from declarations: one for every setting, one for every sampling parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from colibri.cli.failures import reported
from colibri.errors import SettingsError
from colibri.llm.defaults import GenerationDefaults
from colibri.settings import Settings, flag_of, variable_of

Command = Callable[..., None]

MODEL_ARGUMENT = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="Directory of the checkpoint.")
]

# Name -> type and help; the checks are those of `SamplingParams`.
SAMPLING: Mapping[str, tuple[Any, str]] = {
    "max_tokens": (int | None, "New tokens at most; by default the rest of the context."),
    "temperature": (float | None, "0 always takes the most likely token."),
    "top_p": (float | None, "Keep the most likely tokens that reach this probability together."),
    "top_k": (int | None, "Keep this many of the most likely tokens; 0 keeps all."),
    "min_p": (float | None, "Keep tokens at least this likely relative to the most likely one."),
    "repetition_penalty": (float | None, "Above 1: make tokens of prompt and reply less likely."),
    "presence_penalty": (float | None, "Subtracted from logits of tokens that are in the reply."),
    "frequency_penalty": (float | None, "The same, once for each time a token is in the reply."),
    "seed": (int | None, "Makes sampling repeatable."),
    "stop": (list[str] | None, "Text that ends the reply; may be given several times."),
    "stop_ids": (list[int] | None, "Token id that ends the reply; may be given several times."),
    "ignore_eos": (bool, "Go on after the model's own end of turn."),
}


def with_settings(function: Command) -> Command:
    """Give a command a flag for every setting, and report its failures.

    The command takes `settings: Settings`. One that declares `path` has the model as positional
    argument too.
    """
    own = [p for n, p in _parameters(function).items() if n != "settings"]
    flags = [_settings_flag(field.name) for field in Settings.knobs()]
    debug = _option("debug", bool, "Show where an error comes from.", default=False)

    @wraps(function)
    def command(**values: Any) -> None:
        with reported(values.pop("debug")):
            given = {name: values.pop(name) for name in Settings.names()}
            if "path" in values:
                given["model"] = _one_model(values.pop("path"), given["model"])
            function(settings=Settings.resolve(**given), **values)

    return _with_signature(command, [*own, *flags, debug])


def with_sampling(function: Command) -> Command:
    """Give a command a flag for every sampling parameter; it takes them as `sampling`, a dict."""
    own = [p for n, p in _parameters(function).items() if n != "sampling"]
    flags = [
        _option(name, kind, help, default=False if kind is bool else None)
        for name, (kind, help) in SAMPLING.items()
    ]

    @wraps(function)
    def command(**values: Any) -> None:
        sampling = {name: values.pop(name) for name in SAMPLING}
        GenerationDefaults({}, Path()).params(  # a bad value is told before the model is loaded
            **{name: value for name, value in sampling.items() if name != "stop"}
        )
        function(sampling=sampling, **values)

    return _with_signature(command, [*own, *flags])


def _parameters(function: Command) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function, eval_str=True).parameters


def _with_signature(command: Command, parameters: list[inspect.Parameter]) -> Command:
    """What typer looks at: signature and annotations."""
    signature = inspect.Signature(parameters, return_annotation=None)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__  # type: ignore[attr-defined]
    return command


def _settings_flag(name: str) -> inspect.Parameter:
    field = next(field for field in Settings.knobs() if field.name == name)
    shown = "" if field.default is None else f" Default: {field.default}."
    return _option(
        name,
        str | None,
        f"{field.metadata['help']} ({variable_of(name)}).{shown}",
        metavar=field.metadata["metavar"],
        panel="Settings",
    )


def _option(
    name: str,
    kind: Any,
    help: str,
    *,
    default: Any = None,
    metavar: str | None = None,
    panel: str | None = None,
) -> inspect.Parameter:
    flag = flag_of("stop_id" if name == "stop_ids" else name)
    option = typer.Option(
        flag, help=help, metavar=metavar, show_default=False, rich_help_panel=panel
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _one_model(path: str | None, flag: str | None) -> str | None:
    if path is not None and flag is not None and path != flag:
        raise SettingsError(f"two models are named, {path} and {flag}: name one")
    return path if flag is None else flag
