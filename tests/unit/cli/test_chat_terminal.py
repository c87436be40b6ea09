"""`coli chat` as people see it: on a terminal."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.terminal import Terminal, styled
from tests.unit.server.scripted import Running, running, write_model

BOTTOM = r"(?:^|\n)>$"
ANSWER = """<think>hm, *what*</think># Title

Some **bold** words and `code`.

1. one
2. two

```python
x = 1
```

| a | b |
|---|---|
| 1 | 2 |

[here](http://there.example) and the end."""


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(write_model(tmp_path_factory.mktemp("chat") / "scripted")) as server:
        yield server


@pytest.fixture(scope="module")
def chatting(listening: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """One chat for all tests: it takes a second to begin."""
    folder = str(tmp_path_factory.mktemp("cache"))
    with Terminal("chat", "--attach", listening.url, "--cache-dir", folder) as terminal:
        terminal.sees(BOTTOM)
        yield terminal
        terminal.types("\x04")
        assert terminal.ends() == 0


@pytest.fixture
def server(listening: Running) -> Running:
    listening.service.reset()
    return listening


@pytest.fixture
def terminal(server: Running, chatting: Terminal) -> Terminal:
    """A chat that has just begun."""
    chatting.types("/reset\r/set reasoning show\r/set markdown on\r/set\r")
    chatting.sees(f"reasoning show, markdown on.*{BOTTOM}")
    chatting.wipe()
    return chatting


def test_markdown_is_rendered_and_reasoning_dimmed(server: Running, terminal: Terminal) -> None:
    server.service.replies = [ANSWER]
    terminal.types("hi\r")
    shown = terminal.sees(r"hm, \*what\*.*Title\n.*the end\.\n.*tokens \(stop\)")[0]
    for source in ("**", "`", "# ", "<think>", "|---|", "]("):
        assert source not in shown
    for whole in (" 1 one\n 2 two\n", "x = 1", "here (http://there.example) and the end."):
        assert whole in shown
    assert styled(terminal, "bold").bold
    assert b"\x1b[2mh" in terminal.raw
    assert shown.count("Title") == shown.count("one") == 1


def test_it_streams(server: Running, terminal: Terminal) -> None:
    server.service.replies = ["First *words* " + "and **more** " * 20 + "\n\n- a\n- b"]
    steps = 30
    server.service.gate = lambda step: step <= steps
    terminal.types("hi\r")
    assert "*" not in terminal.sees(r"First words and.*")[0]
    steps = 10**6
    terminal.sees(r"more\s+• a\n • b\n.*tokens \(stop\)")


def test_what_is_longer_than_the_screen_is_whole(server: Running, terminal: Terminal) -> None:
    lines = "".join(f"x{i}\n" for i in range(60))
    server.service.replies = [f"```\n{lines}```\n\nend"]
    terminal.types("hi\r")
    terminal.sees(r"end\n.*tokens \(stop\)")
    assert [line.strip() for line in terminal.text.splitlines() if line[1:2] == "x"] == [
        f"x{i}" for i in range(60)
    ]


def test_reasoning_is_hidden_and_markdown_off(server: Running, terminal: Terminal) -> None:
    server.service.replies = ["<think>deep</think>**a**"]
    terminal.types("/set reasoning hide\r/set markdown off\rhi\r")
    shown = terminal.sees(r"\n\*\*a\*\*\n.*tokens \(stop\)")
    assert "deep" not in terminal.text
    assert "thinking" not in shown[0]


def test_lines_are_pasted_whole(server: Running, terminal: Terminal) -> None:
    server.service.replies = ["ok"]
    terminal.types("\x1b[200~one\r\ntwo\nthree\x1b[201~")
    terminal.sees("three")
    terminal.types("\x1b\rfour\r")
    terminal.sees(r"tokens \(stop\)")
    prompt = bytes(t for t in server.service.requests[0].prompt if t < 256)
    assert prompt == b"one\ntwo\nthree\nfour"


def test_commands_parameters_and_files_are_completed(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text(json.dumps({"messages": []}))
    for keys, completed in [
        ("/tok\t", "> /tokens"),
        ("/set top_k\t", "> /set top_k"),
        ("/set reas\t", "> /set reasoning"),
        ("/set reasoning h\t", "> /set reasoning hide"),
        (f"/load {tmp_path}/ta\t", r"talk\.json"),
    ]:
        terminal.types(keys)
        terminal.sees(f"{completed}$")
        terminal.types("\x15")


def test_ctrl_c_stops_the_turn(server: Running, terminal: Terminal) -> None:
    server.service.replies = ["one two three", "four"]
    stop = 5
    server.service.gate = lambda step: step <= stop or bool(server.service.cancelled)
    terminal.types("hi\r")
    terminal.sees(r"\none")
    terminal.types("\x03")
    terminal.sees(r"\(cancelled\).*" + BOTTOM)
    assert server.service.was_cancelled.wait(10)
    terminal.types("again\r")
    terminal.sees(r"four\n.*\(stop\)")


def test_how_far_the_prompt_is(server: Running, terminal: Terminal) -> None:
    server.service.replies = ["ok"]
    server.service.prefill = (100, 300)
    server.service.gate = lambda step: step > 0
    hold = True
    server.service.gate = lambda step: not hold
    terminal.types("hi\r")
    terminal.sees(r"prompt, 300 tokens.* 33 %")
    hold = False
    terminal.sees(r"ok\n.*\(stop\)")
    assert "prompt, 300" not in terminal.text
