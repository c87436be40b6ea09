"""Every knob, declared once; the only reader of the environment.

A setting's value is the explicit keyword or flag, else the variable COLIBRI_<NAME>, else its
default. Flags, variables, checks and documentation are all made from the fields below.
(Over 400 lines because all knobs stand in one table.)
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast, get_args

from colibri.errors import SettingsError
from colibri.memory.reader_config import ReaderConfig
from colibri.settings.parsing import (
    Parse,
    one_of,
    parse_activations,
    parse_block,
    parse_count,
    parse_eviction,
    parse_paths,
    parse_port,
    parse_prefetch,
    parse_seconds,
    parse_size,
    parse_slots,
    parse_switch,
    parse_text,
    parse_texts,
)

if TYPE_CHECKING:  # whoever declares flags must not wait for NumPy: it is imported where used
    from colibri.checkpoint.coding import Coding
    from colibri.kernels.api import Activations
    from colibri.memory.prefetch import PrefetchMode
    from colibri.models.plan import MemoryConfig

PREFIX = "COLIBRI_"

T = TypeVar("T")
KVFormat = Literal["auto", "f32", "bf16", "f16", "int8"]


def knob(default: T, parse: Parse, metavar: str, help: str, command: str | None = None) -> T:
    """Declare a setting: its default, how a value is read, and what to tell about it.

    `command` is the only one that has a flag for it, where not all have.
    """
    told = {"parse": parse, "metavar": metavar, "help": help, "command": command}
    return field(default=default, metadata=told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values for every knob, checked. Build it with `resolve`."""

    model: str | None = knob(
        None,
        parse_text,
        "MODEL",
        "Directory of the checkpoint, or OWNER/NAME in the cache (see `coli pull`); by default the "
        "model that comes along",
    )
    ram: int | None = knob(
        None,
        parse_size,
        "SIZE",
        "Memory of the whole program; by default what the machine has free",
    )
    expert_slots: int | float | None = knob(
        None, parse_slots, "N, P%", "Experts kept in memory; by default what the budget leaves"
    )
    dense: str | None = knob(
        None,
        parse_text,
        "FORMAT",
        "Round dense matrices to this format while they are loaded, such as int8-g64 or int4-g64, "
        "at the cost of accuracy; by default they stay as they are stored",
    )
    experts: str | None = knob(
        None,
        parse_text,
        "FORMAT",
        "Round experts to this format as they are read, so that more of them stay in memory, at "
        "the cost of accuracy; by default they stay as they are stored",
    )
    kv: KVFormat = knob(  # noqa: RUF009  (it is dataclasses.field)
        "auto",
        one_of(*get_args(KVFormat)),
        "FORMAT",
        "How attention keys and values are kept: auto (the checkpoint's own), f32, bf16, f16, or "
        "int8, which halves them and costs accuracy",
    )
    kv_ram: int | None = knob(
        None, parse_size, "SIZE", "Memory for keys and values; by default one full context"
    )
    context_length: int | None = knob(
        None,
        parse_count,
        "TOKENS",
        "Prompt and reply together; by default what the model and memory allow",
    )
    prefill_chunk: int = knob(
        512, parse_count, "TOKENS", "Prompt tokens in one pass; a pass reads each expert once"
    )
    max_sessions: int | None = knob(
        None,
        parse_count,
        "N",
        "Replies that are computed together; a pass reads each expert once for all of them; by "
        "default 4",
        "serve",
    )
    max_waiting: int = knob(
        64, parse_count, "N", "Requests that may wait for their turn; more are turned away", "serve"
    )
    max_stall: float = knob(
        2.0,
        parse_seconds,
        "SECONDS",
        "How long replies may wait for their next token while a prompt is read",
        "serve",
    )
    session_dir: str | None = knob(
        None,
        parse_text,
        "DIR",
        "Keep the state of conversations there, for those that go on after a restart; by default "
        "it is kept in memory only",
    )
    session_disk: int = knob(
        16 << 30, parse_size, "SIZE", "What they may take there; the least recently used go first"
    )
    threads: int | None = knob(
        None, parse_count, "N", "Threads of the native kernels; by default one a core"
    )
    activations: Activations | None = knob(  # noqa: RUF009
        None,
        parse_activations,
        "CODE",
        "How inputs of integer-coded matrices are coded: float32, int16 or int8; by default int16, "
        "and float32 on the reference",
    )
    kernels: Literal["auto", "native", "reference"] = knob(
        "auto",
        one_of("auto", "native", "reference"),
        "KIND",
        "What computes: native (C), reference (NumPy, slow) or auto",
    )
    family: str | None = knob(
        None,
        parse_text,
        "NAME",
        "Read config.json as if its model_type were this: for copies of a known model under "
        "another name",
    )
    mtp: bool = knob(
        False,
        parse_switch,
        "BOOL",
        "Load the heads that foresee further tokens, of models that have any (multi-token "
        "prediction): true or false; it changes no reply, `LLM.mtp_logits` computes them; no heat "
        "is kept then",
    )
    isa: str = knob(
        "auto",
        parse_text,
        "NAME",
        "Instruction set of the native kernels: auto (the fastest that runs here), or one by name "
        "such as generic or avx2",
    )

    eviction: Literal["mixed", "lru", "lfu"] = knob(
        "mixed",
        parse_eviction,
        "POLICY",
        "Which expert makes room for another: mixed (a forecast, or lru where that misses less), "
        "lru (least recently used) or lfu (least often used)",
    )
    heat: bool = knob(
        True,
        parse_switch,
        "BOOL",
        "Count the experts used in a file beside the model, .coli_usage, for later runs to start "
        "from: true or false; none is kept beside the model that comes along",
    )
    warm_start: bool = knob(
        True,
        parse_switch,
        "BOOL",
        "Begin by reading experts that earlier runs used, or all where all fit: true or false",
    )
    prefetch: PrefetchMode = knob(  # noqa: RUF009
        "auto",
        parse_prefetch,
        "MODE",
        "Whether experts that the next layers will probably want are read ahead: auto (where it is "
        "measured to pay), on or off",
    )
    route_trace: str | None = knob(
        None,
        parse_text,
        "FILE",
        "Write down which experts each token chose, for `coli sim`",
    )
    profile: str | None = knob(
        None,
        parse_text,
        "FILE",
        "Write down when what was computed, read and waited for, for ui.perfetto.dev",
    )

    mirror: tuple[str, ...] = knob(
        (),
        parse_paths,
        "DIR",
        "A copy of the model's experts on another drive, whole or made by `coli mirror stage`; may "
        "be given several times",
    )
    reader_threads: int | None = knob(
        None, parse_count, "N", "Expert reads in flight; by default as measured at first use"
    )
    read_block: int | None = knob(
        None,
        parse_block,
        "SIZE",
        "Bytes of one read, larger ones being split, 0 for never; by default as measured at first "
        "use",
    )
    verify_reads: bool = knob(
        True, parse_switch, "BOOL", "Check checksums of experts as they are read: true or false"
    )
    cache_dir: str | None = knob(
        None,
        parse_text,
        "DIR",
        "Where measurements of this machine are kept; by default colibri in the user's cache "
        "directory",
    )

    host: str = knob("127.0.0.1", parse_text, "ADDRESS", "Where the server listens", "serve")
    port: int = knob(8080, parse_port, "N", "Its port; 0 takes a free one", "serve")
    api_key: str | None = knob(
        None, parse_text, "KEY", "What clients must show, as bearer token or x-api-key", "serve"
    )
    expose: bool = knob(
        False,
        parse_switch,
        "BOOL",
        "Listen beyond this machine without a key, for whoever can reach it: true or false",
        "serve",
    )
    served_name: tuple[str, ...] = knob(
        (),
        parse_texts,
        "NAME",
        "A name that requests may call the model by, beside that of its directory; may be given "
        "several times, the first is what the server says",
        "serve",
    )
    allowed_host: tuple[str, ...] = knob(
        (),
        parse_texts,
        "NAME",
        "A host name that requests may be sent to, beside this machine's own addresses; may be "
        "given several times, * allows all",
        "serve",
    )
    cors_origin: tuple[str, ...] = knob(
        (),
        parse_texts,
        "ORIGIN",
        "Web pages of this origin may ask, such as https://chat.example; may be given several "
        "times",
        "serve",
    )
    max_body: int = knob(64 << 20, parse_size, "SIZE", "The largest body of a request", "serve")
    max_connections: int = knob(512, parse_count, "N", "Connections at a time", "serve")
    drain: float = knob(
        10.0,
        parse_seconds,
        "SECONDS",
        "How long running requests may take to end when the server is stopped",
        "serve",
    )

    @classmethod
    def resolve(
        cls,
        environ: Mapping[str, str] | None = None,
        spell: Callable[[str], str] = str,
        /,
        **explicit: object,
    ) -> Self:
        """Defaults < COLIBRI_* variables < `explicit`; an explicit None counts as not given.

        Args:
            environ: the environment; by default the process's own.
            spell: how an explicit name is written in messages, such as `flag_of`.
            explicit: settings by name.

        Raises:
            SettingsError: an unknown name (with the nearest one), or a value that is not allowed.
        """
        variables = os.environ if environ is None else environ
        values: dict[str, object] = {}
        for variable, text in variables.items():
            if variable.startswith(PREFIX):
                knob = _field(variable, map(variable_of, cls.names()), "environment variable")
                name = knob.removeprefix(PREFIX).lower()
                values[name] = _parsed(cls, name, text, variable)
        for given, value in explicit.items():
            name = _field(given, cls.names(), "setting")
            if value is not None:
                values[name] = _parsed(cls, name, value, spell(name))
        return cls(**cast(Any, values))

    @classmethod
    def knobs(cls) -> tuple[Field[Any], ...]:
        """The fields, whose `metadata` holds `parse`, `metavar` and `help`."""
        return fields(cls)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all settings."""
        return tuple(item.name for item in fields(cls))

    @classmethod
    def names_for(cls, command: str) -> tuple[str, ...]:
        """Names of the settings that a command has flags for, where it has them for all."""
        return tuple(f.name for f in fields(cls) if f.metadata["command"] in (None, command))

    @classmethod
    def names_in_environment(cls) -> frozenset[str]:
        """Names of the settings that have a variable in the environment of the process."""
        return frozenset(name for name in cls.names() if variable_of(name) in os.environ)

    @classmethod
    def describe(cls) -> str:
        """A Markdown table of all settings, for the documentation."""
        rows = [
            f"| `{item.name}` | `{flag_of(item.name)}` | `{variable_of(item.name)}` "
            f"| {item.metadata['metavar']} "
            f"| {item.metadata['help']} "
            f"| {f'`{default}`' if (default := shown_default(item)) else '–'} |"
            for item in fields(cls)
        ]
        head = (
            "| setting | flag | variable | value | meaning | default |\n|---|---|---|---|---|---|"
        )
        return "\n".join([head, *rows]) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Every value by name, as JSON can hold it; the key is not shown."""
        return asdict(self) | ({} if self.api_key is None else {"api_key": "…"})

    @property
    def cache(self) -> Path:
        """Where measurements and generated models of this machine are kept."""
        if self.cache_dir is not None:
            return Path(self.cache_dir)
        home = os.environ.get("XDG_CACHE_HOME", "")  # its specification: relative ones are ignored
        return (
            Path(home) if Path(home).is_absolute() else Path("~/.cache").expanduser()
        ) / "colibri"

    @property
    def coding(self) -> Coding:
        """What is rounded at load.

        Raises:
            SettingsError: a format to which nothing is rounded.
        """
        from colibri.checkpoint.coding import Coding

        return Coding.named(self.dense, self.experts)

    @property
    def reader(self) -> ReaderConfig:
        """What the reader needs to know."""
        return ReaderConfig(
            threads=self.reader_threads,
            block=self.read_block,
            verify=self.verify_reads,
            mirrors=tuple(map(Path, self.mirror)),
            cache=self.cache,
        )

    @property
    def memory(self) -> MemoryConfig:
        """What the planner needs to know."""
        from colibri.models.plan import MemoryConfig

        return MemoryConfig(
            ram=self.ram,
            expert_slots=self.expert_slots,
            kv=self.kv,
            kv_ram=self.kv_ram,
            context_length=self.context_length,
            prefill_chunk=self.prefill_chunk,
            max_sessions=self.max_sessions or 1,
        )


def flag_of(name: str) -> str:
    """`expert_slots` -> `--expert-slots`."""
    return f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    """`expert_slots` -> `COLIBRI_EXPERT_SLOTS`."""
    return PREFIX + name.upper()


def _field(name: str, known: Iterable[str], kind: str) -> str:
    names = list(known)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise SettingsError(f"unknown {kind} {name}: {hint}known are {', '.join(names)}")


def _parsed(settings: type[Settings], name: str, value: object, shown: str) -> object:
    parse: Parse = next(f for f in fields(settings) if f.name == name).metadata["parse"]
    try:
        return parse(value)
    except ValueError as error:
        raise SettingsError(f"{shown} is {value!r}: it must be {error}") from None
    except SettingsError as error:
        raise SettingsError(f"{shown}: {error}") from None


def shown_default(field: Field[Any]) -> str:
    """A default as it would be written; empty where there is none."""
    default: Any = field.default
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if field.metadata["metavar"] == "SIZE":
        return f"{default >> 20}MiB" if default % (1 << 30) else f"{default >> 30}GiB"
    return f"{default:g}" if isinstance(default, float) else str(default)
