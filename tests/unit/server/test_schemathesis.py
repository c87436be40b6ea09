"""Requests that schemathesis makes of the server's own description: `make clients` runs it.

Bodies that fit the description and are refused all the same are meant: what a field's type cannot
say, a 400 that names the field does.
"""

import subprocess
import sys

import pytest

from tests.unit.server.scripted import Running

pytestmark = pytest.mark.slow
ASKED = [
    *("--max-examples", "20", "--workers", "4", "--request-timeout", "20", "--no-color"),
    *("--exclude-checks", "positive_data_acceptance"),
    *("--exclude-path", "/v1/embeddings"),  # 501, which counts as the server's error
]


def test_no_request_breaks_the_server(server: Running) -> None:
    pytest.importorskip("schemathesis")
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    done = subprocess.run([*command, *ASKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "Tested: 18" in done.stdout
    assert server.service.requests
