"""Flags made from declarations: one for every setting, one for every sampling parameter."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from colibri.cli.failures import reported
from colibri.errors import SettingsError
from colibri.llm.defaults import GenerationDefaults
from colibri.llm.loading import uses_bundled
from colibri.settings import Settings, flag_of, variable_of

Command = Callable[..., None]

NOTICE = (
    "no model named: using the bundled demo model, a small one that continues text and is no "
    "assistant (--model or COLIBRI_MODEL names another)"
)

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
    return _with_knobs(function, Settings.names())


def with_model(function: Command) -> Command:
    """`with_settings` for a command that needs no other setting than the model."""
    return _with_knobs(function, ("model",))


def with_environment(function: Command) -> Command:
    """Report a command's failures; its settings come from the environment alone, if it asks."""
    return _with_knobs(function, ())


def _with_knobs(function: Command, names: Sequence[str]) -> Command:
    parameters = _parameters(function)
    own = [p for name, p in parameters.items() if name != "settings"]
    flags = [_settings_flag(name) for name in names]
    debug = _option("debug", bool, "Show where an error comes from.", default=False)

    @wraps(function)
    def command(**values: Any) -> None:
        with reported(values.pop("debug")):
            # A flag that may be repeated is an empty list where it is not given.
            given = {name: None if values[name] == [] else values[name] for name in names}
            values = {name: value for name, value in values.items() if name not in given}
            if "path" in values:
                given["model"] = _one_model(values.pop("path"), given["model"])
            settings = Settings.resolve(**given)
            if "settings" in parameters:
                values["settings"] = settings
            if "model" in names and uses_bundled(settings):
                print(NOTICE, file=sys.stderr, flush=True)
            function(**values)

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
    repeated = isinstance(field.default, tuple)
    shown = "" if repeated or field.default is None else f" Default: {field.default}."
    return _option(
        name,
        list[str] | None if repeated else str | None,
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
