"""Flags made from declarations: one for every setting, one for every sampling parameter."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from colibri.cli.commands import OTHER_PANEL
from colibri.cli.failures import reported
from colibri.cli.spelling import flag, speller
from colibri.errors import RequestError, SettingsError
from colibri.llm.defaults import GenerationDefaults
from colibri.llm.location import uses_bundled
from colibri.settings import Settings, shown_default, variable_of

Command = Callable[..., None]

NOTICE = (
    "no model named: using the bundled demo model, a small one that continues text and is no "
    "assistant (--model or COLIBRI_MODEL names another)"
)

JSON = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")]

MODEL_ARGUMENT = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="Directory of the checkpoint, or OWNER/NAME in the cache."
    ),
]

Biases = Annotated[list[str] | None, "ID=X"]

# Name -> type and help; each command ends that of `max_tokens`. Checks are `SamplingParams`'s.
SAMPLING: Mapping[str, tuple[Any, str]] = {
    "max_tokens": (int | None, "New tokens at most; by default"),
    "temperature": (float | None, "0 always takes the most likely token."),
    "top_p": (float | None, "Keep the most likely tokens that reach this probability together."),
    "top_k": (int | None, "Keep this many of the most likely tokens; 0 keeps all."),
    "min_p": (float | None, "Keep tokens at least this likely relative to the most likely one."),
    "repetition_penalty": (float | None, "Above 1: make tokens of prompt and reply less likely."),
    "presence_penalty": (float | None, "Subtracted from logits of tokens that are in the reply."),
    "frequency_penalty": (float | None, "The same, once for each time a token is in the reply."),
    "logit_bias": (Biases, "Added to the logit of a token; may be given several times."),
    "seed": (int | None, "Makes sampling repeatable."),
    "stop": (list[str] | None, "Text that ends the reply; may be given several times."),
    "stop_ids": (list[int] | None, "Token id that ends the reply; may be given several times."),
    "ignore_eos": (bool, "Go on after the model's own end of turn."),
}


KERNELS = ("threads", "activations", "kernels", "isa")
READING = ("mirror", "reader_threads", "read_block", "cache_dir")
MEMORY = (
    "ram",
    "expert_slots",
    "dense",
    "experts",
    "kv",
    "kv_ram",
    "context_length",
    "prefill_chunk",
)
_COMMON = ("model", "ram", "expert_slots")
_ATTACHED = ("cache_dir",)
"""What is heeded where a server has the model: there the lines of `coli chat` are remembered."""


_METAVARS: Mapping[Any, str] = {
    int | None: "N",
    float | None: "X",
    list[str] | None: "TEXT",
    Biases: "ID=X",
    list[int] | None: "ID",
}


def with_settings(function: Command) -> Command:
    """Give a command a flag for every setting, and report its failures.

    The command takes `settings: Settings`. One that declares `path` has the model as positional
    argument too.
    """
    return _with_knobs(function, Settings.names_for(function.__name__))


def with_some(*names: str, notice: bool = True) -> Callable[[Command], Command]:
    """`with_settings` for a command that heeds no others than these.

    `notice` says whether the bundled model is used where none is named, of which users are told.
    """

    def decorate(function: Command) -> Command:
        chosen = [name for name in Settings.names() if name in names]
        return _with_knobs(function, chosen, notice)

    return decorate


def with_model(function: Command) -> Command:
    """`with_settings` for a command that needs no other setting than the model."""
    return _with_knobs(function, ("model",))


def with_environment(function: Command) -> Command:
    """Report a command's failures; its settings come from the environment alone, if it asks."""
    return _with_knobs(function, ())


def _with_knobs(function: Command, names: Sequence[str], notice: bool = True) -> Command:
    parameters = _parameters(function)
    own = [_in_panel(p) for name, p in parameters.items() if name != "settings"]
    common = [_settings_flag(name) for name in names if name in _COMMON]
    flags = [_settings_flag(name) for name in names if name not in _COMMON]
    debug = _option(
        "debug", bool, "Show where an error comes from.", default=False, panel=OTHER_PANEL
    )

    @wraps(function)
    def command(**values: Any) -> None:
        # A flag that may be repeated is an empty list where it is not given.
        given = {name: None if values[name] == [] else values[name] for name in names}
        flagged = [name for name, value in given.items() if value is not None]
        spell = speller([*names, *SAMPLING], flagged)
        with reported(values.pop("debug"), spell):
            values = {name: value for name, value in values.items() if name not in given}
            if values.get("attach") is not None:
                _refuse_local(flagged)
            if "path" in values:
                given["model"] = _one_model(values.pop("path"), given["model"])
            settings = Settings.resolve(None, flag, **given)
            if "settings" in parameters:
                values["settings"] = settings
            loads = "model" in names and values.get("attach") is None
            if notice and loads and uses_bundled(settings):
                print(NOTICE, file=sys.stderr, flush=True)
            function(**values)

    return _with_signature(command, [*common, *own, *flags, debug])


def _refuse_local(flagged: Sequence[str]) -> None:
    """Refuse flags that would change nothing, because a server has the model."""
    local = [flag(name) for name in flagged if name not in _ATTACHED]
    if local:
        verb, them = ("is", "it") if len(local) == 1 else ("are", "them")
        raise SettingsError(
            f"{', '.join(local)} {verb} for a model in this process: leave {them} out with --attach"
        )


def with_sampling(rest: str) -> Callable[[Command], Command]:
    """Give a command a flag for every sampling parameter; it takes them as `sampling`, a dict.

    `rest` says how long a reply may be where `--max-tokens` is not given.
    """

    def decorate(function: Command) -> Command:
        return _with_sampling(function, rest)

    return decorate


def _with_sampling(function: Command, rest: str) -> Command:
    own = [p for n, p in _parameters(function).items() if n != "sampling"]
    flags = [
        _option(
            name,
            kind,
            f"{help} {rest}." if name == "max_tokens" else help,
            default=False if kind is bool else None,
            metavar=_METAVARS.get(kind),
            panel="Sampling",
        )
        for name, (kind, help) in SAMPLING.items()
    ]

    @wraps(function)
    def command(**values: Any) -> None:
        sampling = {name: values.pop(name) for name in SAMPLING}
        sampling["logit_bias"] = _biases(sampling["logit_bias"])
        GenerationDefaults({}, Path()).params(  # a bad value is told before the model is loaded
            **{name: value for name, value in sampling.items() if name != "stop"}
        )
        function(sampling=sampling, **values)

    return _with_signature(command, [*own, *flags])


def _biases(given: Sequence[str] | None) -> dict[int, float] | None:
    """`ID=X`, as often as given."""
    found = {}
    for text in given or ():
        token, _, bias = text.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise RequestError(
                f"logit_bias is {text!r}: give a token id and a number, as in 42=-1.5"
            ) from None
    return found or None


def _parameters(function: Command) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function, eval_str=True).parameters


def _with_signature(command: Command, parameters: list[inspect.Parameter]) -> Command:
    """What typer looks at: signature and annotations, of parameters in any order."""
    by_name = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    signature = inspect.Signature(by_name, return_annotation=None)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__  # type: ignore[attr-defined]
    return command


def _in_panel(parameter: inspect.Parameter) -> inspect.Parameter:
    """A command's own option, in a panel after the common settings."""
    for about in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(about, OptionInfo) and about.rich_help_panel is None:
            about.rich_help_panel = "This command"
    return parameter


def _settings_flag(name: str) -> inspect.Parameter:
    field = next(field for field in Settings.knobs() if field.name == name)
    repeated = isinstance(field.default, tuple)
    default = shown_default(field)
    shown = f" Default: {default}." if default else ""
    return _option(
        name,
        list[str] | None if repeated else str | None,
        f"{field.metadata['help']} ({variable_of(name)}).{shown}",
        metavar=field.metadata["metavar"],
        panel="Common" if name in _COMMON else "Settings",
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
    option = typer.Option(
        *([flag(name), "-m"] if name == "model" else [flag(name)]),
        help=help,
        metavar="" if kind is bool else metavar,
        show_default=False,
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _one_model(path: str | None, flag: str | None) -> str | None:
    if path is not None and flag is not None and path != flag:
        raise SettingsError(f"two models are named, {path} and {flag}: name one")
    return path if flag is None else flag
