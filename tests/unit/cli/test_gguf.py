"""Commands take a GGUF file where they take a directory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from colibri import LLM
from colibri.cli.main import app
from colibri.models import qwen3_moe
from tests.gguf_files import CHANGES, convert
from tests.tiny import write_tiny

FAMILY = qwen3_moe.FAMILY
IDS = np.arange(3, 30, dtype=np.int32)
LETTERS = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [*LETTERS, *(f"[PAD{i}]" for i in range(511 - len(LETTERS))), "ab"],
    "tokenizer.ggml.token_type": [1] * 512,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    source = write_tiny(folder / "source", FAMILY, **CHANGES[FAMILY.model_type])
    return convert(source, folder / "model.gguf", lambda _: "q8_0", **VOCABULARY)[0]


def _encoded(llm: LLM) -> list[int]:
    assert llm.prepared.tokenizer is not None
    return llm.prepared.tokenizer.encode("ab ab")


def coli(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(each) for each in arguments], prog_name="coli")
    assert result.exit_code == 0, result.output
    return result


def test_doctor(file: Path) -> None:
    found = CliRunner().invoke(app, ["doctor", str(file), "--json"], prog_name="coli").stdout
    assert "fetch its files again" not in found
    assert f"coli convert {file} model-container --experts keep" in found


def test_info_plan_and_verify(file: Path) -> None:
    assert json.loads(coli("info", file, "--json").stdout)["family"] == FAMILY.model_type
    assert json.loads(coli("plan", file, "--json").stdout)["kv_format"] == "f16"
    assert json.loads(coli("verify", file, "--json").stdout)["ok"] is True


def test_run(file: Path) -> None:
    found = json.loads(
        coli("run", "--model", file, "--max-tokens", 4, "--ignore-eos", "--json", "ab").stdout
    )
    assert len(found["token_ids"]) == 4


def test_a_converted_file_keeps_every_bit(file: Path, tmp_path: Path) -> None:
    """Codes are kept; tokenizer and template come along as files."""
    container = tmp_path / "container"
    coli("convert", file, container, "--experts", "keep")
    with LLM.open(file, expert_slots=8) as llm:
        wanted, prompt = llm.logits(IDS), _encoded(llm)
    with LLM.open(container, kv="f16") as llm:
        assert np.array_equal(llm.logits(IDS), wanted)
        assert _encoded(llm) == prompt
    assert json.loads(coli("verify", container, "--json").stdout)["ok"] is True
