"""`python -m colibri` is the command `coli`."""

import os
import sys
from contextlib import suppress

INTERRUPTED = 130


def main() -> int:
    """Run the command line; return the exit code. Ctrl-C is heeded while it is imported too."""
    if sys.argv[1:] == ["--version"]:  # needs nothing of what follows
        import colibri

        print(f"coli {colibri.__version__}")
        return 0
    try:
        from colibri.cli.main import main as run

        code = run()
    except KeyboardInterrupt:
        print("coli: interrupted", file=sys.stderr)
        code = INTERRUPTED
    if code == INTERRUPTED:
        _leave(code)
    return code


def _leave(code: int) -> None:
    """End here: Python ends by the signal, not by the code, once Ctrl-C came while a text was run.

    Libraries run texts where they make classes, so that this depends on the moment.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
