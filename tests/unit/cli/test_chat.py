import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from colibri.cli.main import app
from tests.tiny import PLAIN, write_tiny
from tests.unit.cli.conftest import Coli
from tests.unit.llm.fakes import (
    ASSISTANT,
    END_THINK,
    EOS,
    THINK,
    FakeModel,
    write_tokenizer,
)
from tests.unit.server.scripted import running, write_model


def echo(model: FakeModel) -> None:
    """Answer every turn with the number of turns so far, then end of turn."""

    def follow(history: Sequence[int]) -> int:
        return EOS if history[-1] != ASSISTANT else ord("0") + list(history).count(ASSISTANT)

    model.follow = follow


def test_turns_build_on_each_other_until_reset(coli: Coli) -> None:
    coli.prepare = echo
    result = coli("chat", stdin="hi\nagain\n\n/reset\nhi\n/system be kind\nhi\n/quit\nnever\n")
    assert (result.exit_code, result.stdout) == (0, "1\n2\n1\n1\n")


def test_the_end_of_input_ends_it(coli: Coli) -> None:
    coli.prepare = echo
    assert coli("chat", stdin="hi").stdout == "1\n"


def test_state_is_kept_between_turns(coli: Coli) -> None:
    coli.prepare = echo
    coli("chat", stdin="hi\nyou\n")
    # <s><|user|>hi<|assistant|> 1 | </s><|user|>you<|assistant|> 2
    assert coli.model.passes == [5, 1, 6, 1]


def test_a_system_message_begins_anew(coli: Coli) -> None:
    coli.prepare = echo
    coli("chat", "--system", "ab", stdin="hi\n/system abc\nhi\n/system\nhi\n")
    histories = [size for size in coli.model.passes if size > 1]
    # "<|system|>" is no control token of this vocabulary: ten letters
    assert histories[0] == 1 + 10 + 2 + 1 + 2 + 1
    assert coli.model.passes.count(1) == 3


def test_help_and_unknown_commands(coli: Coli) -> None:
    result = coli("chat", stdin="/help\n/dance\n")
    assert "/reset" in result.stderr
    assert "There is no command /dance" in result.stderr
    assert result.stdout == ""


def test_without_a_template_it_says_so_and_continues(coli: Coli) -> None:
    write_tokenizer(coli.directory, chat=False)
    result = coli("chat", "--max-tokens", "3", stdin="a\n")
    assert "no chat template" in result.stderr
    assert result.stdout == "bcd\n"


def test_ctrl_c_stops_the_answer_not_the_program(coli: Coli) -> None:
    def press(number: int, layer: int) -> None:
        if (number, layer) == (2, 0):
            os.kill(os.getpid(), signal.SIGINT)

    def prepare(model: FakeModel) -> None:
        echo(model)
        model.before_layer = press

    coli.prepare = prepare
    result = coli("chat", stdin="hi\nagain\n")
    assert (result.exit_code, result.stdout) == (0, "1\n2\n")
    assert "(cancelled)" in result.stderr


def test_a_full_context_is_told_and_the_conversation_stays(coli: Coli) -> None:
    coli.prepare = echo
    coli.context_length = 64
    result = coli("chat", stdin=f"hi\n{'x' * 100}\nagain\n")
    assert (result.exit_code, result.stdout) == (0, "1\n2\n")
    assert "the context holds 64" in result.stderr
    assert "/reset" in result.stderr


def test_ctrl_c_twice_drops_the_answer_not_the_conversation(coli: Coli) -> None:
    def press(number: int, layer: int) -> None:
        if (number, layer) == (2, 0):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    def prepare(model: FakeModel) -> None:
        echo(model)
        model.before_layer = press

    coli.prepare = prepare
    result = coli("chat", stdin="hi\nagain\n")
    assert result.exit_code == 0
    assert result.stdout.endswith("1\n")
    assert "interrupted" in result.stderr


def test_it_says_how_to_leave_and_confirms(coli: Coli) -> None:
    coli.prepare = echo
    result = coli("chat", stdin="/reset\n/system be kind\n/system\nhi\nquit\nhi\n")
    assert f"{coli.directory.name} · /help lists commands, Ctrl-D leaves" in result.stderr
    assert result.stderr.count("A new conversation begins") == 3
    assert result.stdout == "1\n"
    assert coli("chat", stdin="exit\nhi\n").stdout == ""


def test_retry_answers_again(coli: Coli) -> None:
    coli.prepare = echo
    result = coli("chat", stdin="/retry\nhi\nyou\n/retry\nmore\n")
    assert result.stdout == "1\n2\n2\n3\n"
    assert "nothing to answer again" in result.stderr


def test_conversations_are_saved_and_go_on(coli: Coli, tmp_path: Path) -> None:
    coli.prepare = echo
    file = tmp_path / "talk.json"
    coli("chat", "--system", "be kind", stdin=f"hi\n/save {file}\n")
    kept = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in kept] == ["system", "user", "assistant"]
    result = coli(
        "chat", stdin=f"/load {file}\nyou\n/reset\nhi\n/load {tmp_path / 'none'}\n/save\n"
    )
    assert result.stdout == "2\n1\n"
    assert "The conversation goes on: 3 messages" in result.stderr
    assert "none" in result.stderr
    assert "needs the name" in result.stderr


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"messages": [1]}', '{"messages": [{}]}'])
def test_files_that_hold_no_conversation(coli: Coli, tmp_path: Path, text: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text)
    assert "holds no conversation" in coli("chat", stdin=f"/load {file}\n").stderr


def test_parameters(coli: Coli) -> None:
    result = coli(
        "chat",
        stdin="/set top_k 5\n/set\n/set top_k\n/set top_p 3\n/set heat 1\n/set reasoning no\n",
    )
    assert "top_k 5" in result.stderr
    for told in ("top_p is 3", "unknown argument heat", "reasoning is 'no'"):
        assert told in result.stderr


def test_tokens_and_stats(coli: Coli) -> None:
    coli.prepare = echo
    result = coli("chat", stdin="/tokens\nhi\n/tokens\n/stats\n")
    assert "0 of 256 tokens" in result.stderr
    assert "8 of 256 tokens" in result.stderr
    assert "1 answers, 2 tokens" in result.stderr


def test_reasoning_is_no_part_of_the_answer(coli: Coli, tmp_path: Path) -> None:
    def prepare(model: FakeModel) -> None:
        model.says([THINK, *b"hm", END_THINK, *b"\nyes"], 5)

    coli.prepare = prepare
    file = tmp_path / "talk.json"
    result = coli("chat", stdin=f"hi\n/save {file}\n")
    assert result.stdout == "yes\n"
    assert json.loads(file.read_text())["messages"][1]["reasoning_content"] == "hm"


def test_stop_strings_end_an_answer(coli: Coli) -> None:
    coli.prepare = lambda model: model.says("one two", 5)
    result = coli("chat", "--stop", "two", stdin="hi\n")
    assert result.stdout == "one \n"
    assert "(stop)" in result.stderr


def test_a_server_answers(tmp_path: Path) -> None:
    with running(write_model(tmp_path / "scripted")) as server:
        server.service.replies = ["<think>hm</think>one", "two"]
        result = CliRunner().invoke(
            app,
            ["chat", "--attach", server.url, "--temperature", "0.5", "--system", "S"],
            input="hi\nyou\n/tokens\n/stats\n" + "x" * 600 + "\n",
        )
        assert (result.exit_code, result.stdout) == (0, "one\ntwo\n"), result.output
        assert server.service.requests[0].params.temperature == 0.5
    for told in (
        "scripted at http",
        "of 512 tokens",
        "2 answers",
        "too many",
        "tokens (stop) from",
    ):
        assert told in result.stderr
    assert "no model named" not in result.stderr


def test_nobody_answers() -> None:
    result = CliRunner().invoke(app, ["chat", "--attach", "127.0.0.1:9"])
    assert result.exit_code == 2
    assert "127.0.0.1:9 does not answer" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ram", "1GB"], "--ram is for a model in this process: leave it out with --attach"),
        (["-m", "m", "--mirror", "d"], "--model, --mirror are for a model in this process: leave"),
    ],
)
def test_a_server_takes_no_settings_of_a_model(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["chat", "--attach", "127.0.0.1:9", *flags])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_server_needs_no_variables_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_RAM", "1GB")
    result = CliRunner().invoke(app, ["chat", "--attach", "127.0.0.1:9", "--cache-dir", "d"])
    assert "127.0.0.1:9 does not answer" in result.stderr


def test_a_server_that_wants_a_key_is_told_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(write_model(tmp_path / "scripted"), api_key="s3cret") as server:
        result = CliRunner().invoke(app, ["chat", "--attach", server.url])
        assert result.exit_code == 2
        assert "set COLIBRI_API_KEY to the key it asks for" in result.stderr
        monkeypatch.setenv("COLIBRI_API_KEY", "s3cret")
        assert CliRunner().invoke(app, ["chat", "--attach", server.url]).exit_code == 0


def test_a_script_without_any_answer_fails(coli: Coli) -> None:
    coli.context_length = 64
    result = coli("chat", stdin=f"{'x' * 100}\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the context holds 64" in result.stderr


def test_without_a_tokenizer_there_is_no_conversation(coli: Coli) -> None:
    (coli.directory / "tokenizer.json").unlink()
    result = coli("chat", stdin="hi\n")
    assert result.exit_code == 3
    assert "has no tokenizer (tokenizer.json): put it there, or use `coli run --ids`" in (
        result.stderr
    )


def test_a_server_without_a_template_continues(tmp_path: Path) -> None:
    with running(write_model(tmp_path / "plain", template=None)) as server:
        server.service.replies = ["lo"]
        result = CliRunner().invoke(app, ["chat", "--attach", server.url], input="hel\n/tokens\n")
        assert (result.exit_code, result.stdout) == (0, "lo\n")
        assert server.service.requests[0].prompt == tuple(b"hel")
        assert server.service.requests[0].params.max_tokens == 100
    assert "no chat template" in result.stderr
    assert "5 of 512 tokens" in result.stderr


def test_what_was_computed_is_resumed_from_disk(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", PLAIN)
    write_tokenizer(model)
    command = ["chat", "-m", str(model), "--session-dir", str(tmp_path / "kept"), "--heat", "false"]
    command += ["--max-tokens", "2", "--ignore-eos"]
    talks = [["x" * 80], ["x" * 80, "y"]]
    first, second = (CliRunner().invoke(app, command, input="\n".join(talk)) for talk in talks)
    for result in (first, second):
        assert result.exit_code == 0, result.output
        assert f"conversations is kept in {tmp_path / 'kept'}" in result.stderr
    assert "Resumed" not in first.stderr
    assert second.stdout.startswith(first.stdout)
    assert second.stderr.count("Resumed: 82 of 83 prompt tokens were kept on disk.") == 1
    assert second.stderr.count("Resumed") == 1


def test_files_that_cannot_be_used_are_told_in_words(coli: Coli, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("precious")
    told = coli(
        "chat",
        stdin=f"/load {tmp_path}/no/t\n/save {tmp_path}/no/t\n/save {other}\n/load {other}\n",
    ).stderr
    assert f"{tmp_path}/no/t cannot be read: no such file or directory" in told
    assert f"{tmp_path}/no/t cannot be written: no such file or directory" in told
    assert f"{other} holds something else: name another file" in told
    assert f"{other} holds no conversation: name a file that /save wrote" in told
    assert "Errno" not in told
    assert other.read_text() == "precious"


def test_a_path_is_no_command(coli: Coli) -> None:
    coli.prepare = echo
    assert coli("chat", stdin="/usr/bin/env is what?\n").stdout == "1\n"
