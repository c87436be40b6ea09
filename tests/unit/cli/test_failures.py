import pytest

from colibri import errors
from colibri.errors import ColibriError
from colibri.llm import LLM
from tests.unit.cli.conftest import Coli

TYPED = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ColibriError) and kind is not errors.Cancelled
]


@pytest.mark.parametrize("kind", TYPED)
def test_a_typed_error_is_one_message_and_its_code(
    coli: Coli, monkeypatch: pytest.MonkeyPatch, kind: type[ColibriError]
) -> None:
    def fail(*_: object) -> LLM:
        raise kind("the file x: wanted 1, found 2")

    monkeypatch.setattr(LLM, "from_settings", fail)
    result = coli("run", "hi")
    assert result.exit_code == kind.exit_code != 0
    assert result.stdout == ""
    assert result.stderr == "coli: error: the file x: wanted 1, found 2\n"


def test_a_bug_is_short_and_debug_shows_where(coli: Coli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> LLM:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(LLM, "from_settings", fail)
    result = coli("run", "hi")
    assert result.exit_code == 70
    assert "coli: bug: ZeroDivisionError: oops" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in coli("run", "hi", "--debug").stderr


def test_ctrl_c_while_loading(coli: Coli, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: object) -> LLM:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "from_settings", press)
    result = coli("run", "hi")
    assert (result.exit_code, result.stderr) == (130, "coli: interrupted\n")


@pytest.mark.parametrize("arguments", [["run", "--no-such-flag"], ["dance"], ["run", "a", "b"]])
def test_usage_errors(coli: Coli, arguments: list[str]) -> None:
    result = coli(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_an_unknown_variable_is_an_error(coli: Coli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_TREADS", "2")
    result = coli("run", "hi")
    assert result.exit_code == 2
    assert "did you mean COLIBRI_THREADS?" in result.stderr


def test_version(coli: Coli) -> None:
    result = coli("--version")
    assert (result.exit_code, result.stdout.split()[0]) == (0, "coli")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (MemoryError("Unable to allocate 3 GiB"), 4, "out of memory (Unable to allocate 3 GiB)"),
        (OSError(28, "No space left on device"), 74, "No space left on device"),
    ],
)
def test_what_the_system_refuses_is_no_bug(
    coli: Coli, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, message: str
) -> None:
    def fail(*_: object) -> LLM:
        raise error

    monkeypatch.setattr(LLM, "from_settings", fail)
    result = coli("run", "hi")
    assert result.exit_code == code
    assert result.stderr.startswith("coli: error: ")
    assert message in result.stderr
