"""How a command fails: one readable message on stderr and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from colibri.errors import BudgetError, Cancelled, ColibriError

BUG_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
OS_EXIT_CODE = 74  # EX_IOERR
PIPE_EXIT_CODE = 128 + 13  # as a shell reports a process that died of SIGPIPE


@contextmanager
def reported(debug: bool, spell: Callable[[str], str] = str) -> Iterator[None]:
    """Turn exceptions into exit codes.

    Args:
        debug: show where they come from.
        spell: writes names in messages as they were typed.
    """
    try:
        yield
    except (KeyboardInterrupt, Cancelled):
        _say("interrupted")
        raise typer.Exit(Cancelled.exit_code) from None
    except BrokenPipeError:
        _silence_stdout()
        raise typer.Exit(PIPE_EXIT_CODE) from None
    except MemoryError as error:
        _trace(debug)
        _say(spell(f"error: out of memory ({error}): lower `ram`, or what was asked of it"))
        raise typer.Exit(BudgetError.exit_code) from None
    except OSError as error:
        _trace(debug)
        _drain_stdout()
        _say(f"error: {error}")
        raise typer.Exit(OS_EXIT_CODE) from None
    except ColibriError as error:
        _trace(debug)
        _say(f"error: {spell(str(error))}")
        raise typer.Exit(error.exit_code) from None
    except typer.Exit:
        raise
    except Exception as error:
        _trace(debug)
        _say(f"bug: {type(error).__name__}: {error}\nThis should not happen; please report it.")
        if not debug:
            _say("Run the command again with --debug to see where it comes from.")
        raise typer.Exit(BUG_EXIT_CODE) from None


def _say(message: str) -> None:
    try:
        print(f"coli: {message}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        return


def _trace(debug: bool) -> None:
    if debug:
        traceback.print_exc(file=sys.stderr)


def _drain_stdout() -> None:
    try:
        sys.stdout.flush()
    except OSError:  # it is what failed
        _silence_stdout()


def _silence_stdout() -> None:
    """Nobody reads any more: what is still buffered must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
