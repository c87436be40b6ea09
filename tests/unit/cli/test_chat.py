import os
import signal
from collections.abc import Sequence

from tests.unit.cli.conftest import Coli
from tests.unit.llm.fakes import ASSISTANT, EOS, FakeModel, write_tokenizer


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
