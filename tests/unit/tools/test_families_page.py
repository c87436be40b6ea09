"""docs/FAMILIES.md says what the families' files say."""

import subprocess
import sys

from tests.architecture.sources import ROOT


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, "tools/make_families.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
