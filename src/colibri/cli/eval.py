"""`coli eval`: what a model, or a choice that costs accuracy, is worth on a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from colibri.cli.bench_report import report
from colibri.cli.commands import Command, new_app
from colibri.cli.options import JSON, with_some
from colibri.cli.progress import Reporter
from colibri.errors import SettingsError
from colibri.lab.envelope import Envelope
from colibri.lab.eval_importance import eval_importance
from colibri.lab.eval_kl import eval_kl
from colibri.lab.eval_ppl import eval_ppl
from colibri.lab.eval_tasks import DELIMITER, eval_tasks
from colibri.lab.eval_text import Cut
from colibri.settings import Settings

app = new_app(
    name="eval", help="Measure what a model, or a setting, is worth.", no_args_is_help=True
)

_UNUSED = ("route_trace", "session_dir", "session_disk", "max_sessions", "max_waiting", "max_stall")
_SETTINGS = tuple(name for name in Settings.names_for("eval") if name not in _UNUSED)

_PPL = """\
perplexity: exp of the mean negative log-likelihood of the tokens, with its 90 % interval (bootstrap
over blocks of 64 tokens). bits/byte does not depend on the vocabulary."""
_KL = """\
KL: nats by which the reference's prediction of a token differs, 0 where they are equal; with its
90 % interval (bootstrap over blocks of 64 tokens). top-1: the same token is likeliest."""
_TASKS = """\
acc: the right answer is likeliest; acc_norm: likeliest per character; ± one standard error."""

TEXTS = Annotated[
    list[Path], typer.Argument(metavar="TEXT…", help="Text files in UTF-8, each a figure.")
]
OUTPUT = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="Where it is written, for `coli convert`."),
]
TASKS = Annotated[
    list[Path],
    typer.Argument(
        metavar="TASK…",
        help="Files of questions, one a line: "
        '{"context": "…", "choices": ["…", "…"], "answer": 0}.',
    ),
]
CONTEXT = Annotated[
    int | None,
    typer.Option(
        "--window", min=2, metavar="N", help="Tokens of one window. Default: the context, to 2,048."
    ),
]
STRIDE = Annotated[
    int | None,
    typer.Option(
        "--stride", min=1, metavar="N", help="Tokens from window to window. Default: half of one."
    ),
]
TOKENS = Annotated[
    int | None,
    typer.Option("--tokens", min=2, metavar="N", help="Read the first N tokens of each text."),
]
REFERENCE = Annotated[
    list[str],
    typer.Option(
        "--reference",
        metavar="SETTING=VALUE",
        help="What the reference has in place of the settings given, such as activations=float32 "
        "or model=DIR; may be given several times.",
    ),
]
LIMIT = Annotated[
    int | None, typer.Option("--limit", min=1, metavar="N", help="Ask the first N of each task.")
]
BETWEEN = Annotated[
    str,
    typer.Option(
        "--delimiter",
        metavar="TEXT",
        help="What stands between context and answer where there is no blank.",
        show_default="a blank",
    ),
]


@app.command("ppl", cls=Command)
@with_some(*_SETTINGS)
def ppl(
    texts: TEXTS,
    *,
    window: CONTEXT = None,
    stride: STRIDE = None,
    tokens: TOKENS = None,
    as_object: JSON = False,
    settings: Settings,
) -> None:
    """Perplexity of texts.

    One that is interrupted goes on where it was when it is asked again.
    """
    cut = Cut(context=window, stride=stride, tokens=tokens)
    _evaluate(lambda progress: eval_ppl(texts, cut, settings, progress), as_object, ppl_table, _PPL)


@app.command("kl", cls=Command)
@with_some(*_SETTINGS)
def kl(
    texts: TEXTS,
    *,
    reference: REFERENCE,
    window: CONTEXT = None,
    stride: STRIDE = None,
    tokens: TOKENS = None,
    as_object: JSON = False,
    settings: Settings,
) -> None:
    """How far a setting's predictions are from a reference's, in nats, and how often they agree.

    One that is interrupted goes on where it was when it is asked again.
    """
    cut = Cut(context=window, stride=stride, tokens=tokens)
    other = replaced(settings, reference)
    _evaluate(
        lambda progress: eval_kl(texts, cut, settings, other, progress), as_object, kl_table, _KL
    )


@app.command("tasks", cls=Command)
@with_some(*_SETTINGS)
def tasks(
    files: TASKS,
    *,
    limit: LIMIT = None,
    delimiter: BETWEEN = DELIMITER,
    as_object: JSON = False,
    settings: Settings,
) -> None:
    """Share of multiple-choice questions that a model answers rightly, by likelihood.

    One that is interrupted goes on where it was when it is asked again.
    """
    _evaluate(
        lambda progress: eval_tasks(files, settings, progress, limit=limit, delimiter=delimiter),
        as_object,
        tasks_table,
        _TASKS,
    )


@app.command("importance", cls=Command)
@with_some(*_SETTINGS)
def importance(
    texts: TEXTS,
    *,
    output: OUTPUT,
    window: CONTEXT = None,
    tokens: TOKENS = None,
    as_object: JSON = False,
    settings: Settings,
) -> None:
    """Write down which inputs experts meet in texts, so that rounding spares what matters.

    `coli convert --importance FILE` then chooses scales by it. Texts should be of the kind that the
    model is used for, and long enough that every expert is met.
    """
    cut = Cut(context=window, tokens=tokens, apart=True)
    _evaluate(
        lambda progress: eval_importance(texts, output, cut, settings, progress),
        as_object,
        importance_table,
        "",
    )


def _evaluate(
    run: Callable[[Reporter], Envelope],
    as_object: bool,
    table: Callable[[Sequence[Mapping[str, Any]]], Table],
    caption: str,
) -> None:
    with Reporter() as reporter:
        envelope = run(reporter)
    report(envelope, as_object, table(envelope.results), caption)


def replaced(settings: Settings, changes: Sequence[str]) -> Settings:
    """Settings with some `name=value` changed.

    Raises:
        SettingsError: a change that is none, an unknown setting, or a value that is not allowed.
    """
    given = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise SettingsError(
                f"--reference is {change!r}: give a setting and its value, as in kv=f32"
            )
        given[name.strip().removeprefix("--").replace("-", "_")] = value
    parsed = Settings.resolve({}, lambda name: f"--reference {name}", **given)
    known = [item.name for item in fields(Settings) if item.name in given]
    return replace(settings, **{name: getattr(parsed, name) for name in known})


def _columns(*names: str) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 1))
    for number, name in enumerate(names):
        shown.add_column(name, justify="right" if number else "left", no_wrap=True)
    return shown


def _length(row: Mapping[str, Any]) -> str:
    whole = row["tokens_of_text"]
    return f"{row['tokens']:,}" + ("" if row["tokens"] == whole else f" of {whole:,}")


def ppl_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Perplexities as people read them."""
    shown = _columns("text", "tokens", "perplexity", "90 %", "bits/byte")
    for row in rows:
        low, high = row["interval"]
        between, bits = f"{low:.4g} to {high:.4g}", f"{row['bits_per_byte']:.4f}"
        name = Path(row["text"]).name
        shown.add_row(name, _length(row), f"{row['perplexity']:.4f}", between, bits)
    return shown


def kl_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Divergences as people read them."""
    shown = _columns("text", "tokens", "KL", "90 %", "median", "99 %", "top-1", "perplexity")
    for row in rows:
        low, high = row["interval"]
        shown.add_row(
            Path(row["text"]).name,
            _length(row),
            f"{row['kl']:.5f}",
            f"{low:.5f} to {high:.5f}",
            f"{row['kl_median']:.5f}",
            f"{row['kl_p99']:.4f}",
            f"{row['top1_agreement']:.2%}",
            f"x {row['perplexity_ratio']:.4f}",
        )
    return shown


def importance_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What was seen."""
    shown = _columns("file", "tokens", "experts", "never met", "tokens of an expert")
    for row in rows:
        median = f"{row['median_tokens_of_an_expert']:,.0f}"
        shown.add_row(
            row["file"],
            f"{row['tokens']:,}",
            f"{row['experts']:,}",
            f"{row['experts_unseen']:,}",
            f"{row['fewest_tokens_of_an_expert']:,} at least, {median} in the middle",
        )
    return shown


def tasks_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Shares as people read them."""
    shown = _columns("task", "questions", "acc", "acc_norm")
    for row in rows:
        asked, whole = row["questions"], row["questions_of_task"]
        shown.add_row(
            Path(row["task"]).name,
            f"{asked:,}" + ("" if asked == whole else f" of {whole:,}"),
            *(_share(row[name], row[f"{name}_stderr"]) for name in ("acc", "acc_norm")),
        )
    return shown


def _share(share: float, stderr: float | None) -> str:
    return f"{share:.2%}" + ("" if stderr is None else f" ± {stderr:.2%}")
