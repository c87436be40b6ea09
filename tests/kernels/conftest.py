"""These tests are about native code; without the library they are skipped, and say why."""

import pytest

from colibri.kernels.library import unavailable_reason


@pytest.fixture(autouse=True)
def _library() -> None:
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(f"no kernel library: {reason}")
