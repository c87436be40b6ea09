import io

from rich.console import Console

from colibri.cli.progress import Reporter


def on_terminal() -> tuple[Reporter, io.StringIO]:
    out = io.StringIO()
    return Reporter(Console(file=out, force_terminal=True, width=100)), out


def test_a_terminal_sees_stages_and_prompts() -> None:
    reporter, out = on_terminal()
    with reporter:
        reporter("dense weights", 1, 2)
        reporter("dense weights", 2, 2)
        reporter.close()
        reporter.prompt(0, 10)
        reporter.prompt(10, 10)
    assert "dense weights" in out.getvalue()
    assert "100 %" in out.getvalue()
    assert "prompt, 10 tokens" in out.getvalue()


def test_the_cursor_comes_back() -> None:
    reporter, out = on_terminal()
    with reporter:
        reporter("dense weights", 1, 2)
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")


def test_elsewhere_there_is_one_line() -> None:
    out = io.StringIO()
    reporter = Reporter(Console(file=out, force_terminal=False))
    reporter("opening [x]", 0, 1)
    reporter("opening [x]", 1, 1)
    reporter("dense weights", 1, 1)
    reporter.prompt(0, 5)
    assert out.getvalue() == "opening [x] …\n"
