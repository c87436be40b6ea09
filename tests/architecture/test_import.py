"""`import colibri` stays light."""

import json
import subprocess
import sys

HEAVY = {
    *("aiohttp", "django", "fastapi", "flask", "starlette", "tornado", "uvicorn"),
    *("ray", "torch", "transformers", "triton"),
    *("prompt_toolkit", "rich", "typer"),
}


def test_import_brings_in_nothing_heavy() -> None:
    code = "import json, sys, colibri; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    modules = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert "colibri" in modules
    assert modules & HEAVY == set()


def test_the_facade_is_at_the_top() -> None:
    code = "from colibri import LLM; print(LLM.__name__)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "LLM\n"
