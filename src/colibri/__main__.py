"""`python -m colibri` is the command `coli`."""

import sys

from colibri.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
