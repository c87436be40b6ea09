"""Whole replies over a C library whose reads misbehave: the same tokens, or one clean error."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.memory.records import KINDS
from tests.unit.memory.shim import compile_shim, needs_shim, preloaded

SCRIPT = """
import ctypes, shutil, sys
from pathlib import Path
from colibri import LLM
from colibri.errors import ReadError

shim, model, copy, kernels = sys.argv[1:]
faults = ctypes.CDLL(shim)
prompt, request = [17, 200, 3, 88, 45, 9], {"max_tokens": 6, "ignore_eos": True}
settings = {"expert_slots": 4, "kernels": kernels, "read_block": 4096, "warm_start": False}
with LLM.open(model, **settings) as llm:
    expected = llm.generate(prompt, **request).token_ids
    for fault in ("none", "short page", "short odd", "interrupted", "again", "no direct"):
        faults.set_fault(("none", "short page", "short odd", "interrupted", "again",
                          "no direct").index(fault))
        assert llm.generate(prompt, **request).token_ids == expected, fault
    faults.set_fault(0)
broken = sorted(Path(model).glob("experts*.safetensors"))[-1]
with LLM.open(model, **settings) as llm:
    for _ in range(3):
        faults.break_file(str(broken).encode())
        try:
            llm.generate(prompt, **request)
            raise SystemExit("no error")
        except ReadError as error:
            assert str(broken) in str(error) and "byte" in str(error), error
        faults.break_file(b"")
        assert llm.generate(prompt, **request).token_ids == expected
        counts = llm.metrics().experts
        assert counts.hits + counts.misses == counts.requests
shutil.copytree(model, copy)
with LLM.open(model, mirror=copy, **settings) as llm:
    faults.break_file(str(broken).encode())
    assert llm.generate(prompt, **request).token_ids == expected
    faults.break_file(copy.encode())
    assert llm.generate(prompt, **request).token_ids == expected
print("done")
"""


@needs_shim
@pytest.mark.parametrize("kernels", ["native", "reference"][0 if "native" in KINDS else 1 :])
def test_replies_survive_faults(
    tiny: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kernels: str
) -> None:
    shim = compile_shim(tmp_path_factory.mktemp("shim"))
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, shim, tiny, tmp_path / "copy", kernels],
        env=preloaded(shim),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout == "done\n", result.stderr
    assert result.stderr.count("is not read any more") == 1
