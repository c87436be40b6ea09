"""`coli eval`: tables for people, one envelope for machines, and what is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from colibri.cli.main import app

TEXT = "The hummingbird is the only bird that flies backwards. " * 3
TASK = {"context": "The hummingbird is a", "choices": ["bird", "kind of stone"], "answer": 0}
FILES = {"ppl": "text", "kl": "text", "tasks": "task"}
FLAGS = {"kl": ("--kv", "int8", "--reference", "kv=f32")}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLIBRI_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "task").write_text("".join(json.dumps(TASK) + "\n" for _ in range(3)))
    return tmp_path


def coli(kind: str, model: Path, files: Path, *flags: str) -> Result:
    arguments = ("eval", kind, str(files / FILES[kind]), "--model", str(model), *flags)
    return CliRunner().invoke(app, list(arguments), prog_name="coli")


@pytest.mark.parametrize("kind", FILES)
def test_one_envelope_and_one_table(kind: str, tiny: Path, files: Path) -> None:
    given = FLAGS.get(kind, ())
    result = coli(kind, tiny, files, "--json", *given)
    assert result.exit_code == 0, result.output
    envelope = json.loads(result.stdout)
    assert envelope["schema"] == f"colibri.eval.{kind}/1"
    assert envelope["settings"]["model"] == str(tiny)
    (row,) = envelope["results"]
    table = coli(kind, tiny, files, *given).stdout
    wanted = {
        "ppl": lambda: f"{row['perplexity']:.4f}",
        "kl": lambda: f"{row['kl']:.5f}",
        "tasks": lambda: f"{row['acc']:.2%}",
    }
    assert wanted[kind]() in table
    assert FILES[kind] in table


def test_the_reference_differs_in_what_is_said(tiny: Path, files: Path) -> None:
    result = coli("kl", tiny, files, "--json", "--threads", "1", "--reference", "threads=2")
    envelope = json.loads(result.stdout)
    assert envelope["settings"]["threads"] == 1
    assert envelope["settings"]["reference"]["threads"] == 2
    assert envelope["settings"]["reference"]["model"] == str(tiny)
    assert envelope["results"][0]["kl"] == 0  # threads change no bit


def test_part_of_a_text_is_said_to_be_that(tiny: Path, files: Path) -> None:
    result = coli("ppl", tiny, files, "--tokens", "50")
    assert "50 of 1" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--reference", "kv"), "a setting and its value, as in kv=f32"),
        (
            ("--reference", "activation=int8"),
            "unknown setting activation: did you mean activations?",
        ),
        (("--reference", "kv=f33"), "--reference kv is 'f33': it must be"),
        (("--reference", "kv=f32", "--window", "100000"), "raise --context-length"),
        ((), "Missing option '--reference'"),
    ],
)
def test_what_is_refused(tiny: Path, files: Path, flags: tuple[str, ...], message: str) -> None:
    result = coli("kl", tiny, files, *flags)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
