"""`python -m colibri` is the command `coli`."""

import sys


def main() -> int:
    """Run the command line; return the exit code. Ctrl-C is heeded while it is imported too."""
    if sys.argv[1:] == ["--version"]:  # needs nothing of what follows
        import colibri

        print(f"coli {colibri.__version__}")
        return 0
    try:
        from colibri.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("coli: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
