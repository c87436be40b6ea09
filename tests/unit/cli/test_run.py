import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from colibri.cli.progress import Reporter
from colibri.cli.run import show
from colibri.engine.request import SamplingParams
from colibri.llm import Chunk
from colibri.settings import Settings
from tests.unit.cli.conftest import Coli
from tests.unit.llm.fakes import EOS, FakeModel

KEYS = [
    *("text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens"),
    *("ttft_s", "prefill_s", "decode_s", "decode_tokens_per_s"),
    *("expert_requests", "expert_hits", "expert_hit_rate", "bytes_read", "table_bytes"),
    *("ahead_bytes", "ahead_useful_bytes", "ahead_late_bytes", "ahead_wasted_bytes"),
    "prefetch_recall",
    *("peak_rss_bytes", "ram_budget_bytes", "settings"),
]


def says(coli: Coli, reply: str, prompt_tokens: int = 2) -> None:
    coli.prepare = lambda model: model.says(reply, prompt_tokens)


def test_text_goes_to_stdout_and_all_else_to_stderr(coli: Coli) -> None:
    says(coli, "hello 🐦")
    result = coli("run", "hi")
    assert (result.exit_code, result.stdout) == (0, "hello 🐦\n")
    footer = result.stderr.splitlines()[-1]
    assert "11 tokens (stop)" in footer
    for part in ("tok/s", "experts 75% from memory", "10.7 KiB read", "of 1.0 TiB"):
        assert part in footer


def test_json_is_one_object_with_the_documented_keys(coli: Coli) -> None:
    says(coli, "hello")
    result = coli("run", "hi", "--json", "--temperature", "0.5", "--seed", "7")
    reply = json.loads(result.stdout)
    assert list(reply) == KEYS
    assert (reply["text"], reply["token_ids"]) == ("hello", [*b"hello", EOS])
    assert (reply["expert_requests"], reply["expert_hits"]) == (24, 18)
    assert reply["expert_hit_rate"] == 0.75
    assert reply["settings"]["sampling"]["seed"] == 7
    assert set(Settings.names()) <= reply["settings"].keys()


def test_the_prompt_may_come_through_stdin(coli: Coli) -> None:
    says(coli, "hello")
    assert coli("run", stdin="hi\n").stdout == "hello\n"


def test_stdin_that_is_no_text(coli: Coli) -> None:
    result = coli("run", stdin=b"\xff")
    assert result.exit_code == 2
    assert "stdin is no text" in result.stderr


def test_ids(coli: Coli) -> None:
    assert json.loads(coli("run", "--ids", "1, 2 3", "--json", "--max-tokens", "2").stdout)[
        "token_ids"
    ] == [4, 5]
    assert "write token ids" in coli("run", "--ids", "one").stderr


def test_without_a_tokenizer_ids_are_printed(coli: Coli) -> None:
    (coli.directory / "tokenizer.json").unlink()
    assert coli("run", "--ids", "7", "--max-tokens", "3").stdout.split() == ["8", "9", "10"]


def test_chat_asks_through_the_template(coli: Coli) -> None:
    says(coli, "hello", prompt_tokens=5)
    assert coli("run", "--chat", "hi").stdout == "hello\n"
    assert coli("run", "--chat", "--ids", "1").exit_code == 2


def test_flags_and_variables_become_settings(coli: Coli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLIBRI_HEAT")
    monkeypatch.setenv("COLIBRI_RAM", "2GiB")
    monkeypatch.setenv("COLIBRI_KV", "f32")
    coli("run", "hi", "--ram", "1GiB", "--expert-slots", "25%", "--model", "here")
    expected = Settings(model="here", ram=2**30, expert_slots=0.25, kv="f32")
    assert coli.settings == expected


def test_sampling_flags_reach_the_request(coli: Coli) -> None:
    says(coli, "hello STOP more")
    assert coli("run", "hi", "--stop", "STOP", "--stop", "zzz").stdout == "hello \n"
    assert coli("run", "hi", "--stop-id", str(ord("l"))).stdout == "he\n"
    assert coli("run", "hi", "--max-tokens", "2").stdout == "he\n"
    assert (
        coli("run", "hi", "--logit-bias", f"{ord('l')}=-100", "--max-tokens", "2").stdout == "he\n"
    )
    bad = coli("run", "hi", "--logit-bias", "5")
    assert (bad.exit_code, "give a token id and a number" in bad.stderr) == (2, True)
    assert coli("run", "hi", "--max-tokens", "17", "--ignore-eos").stdout == "hello STOP more\n"


@pytest.mark.parametrize("command", ["run", "chat"])
def test_every_sampling_parameter_has_a_flag(coli: Coli, command: str) -> None:
    text = coli(command, "--help").stdout
    names = SamplingParams().as_dict().keys() - {"stop_ids"} | {"stop", "stop_id"}
    assert [name for name in names if f"--{name.replace('_', '-')} " not in text] == []


@pytest.mark.parametrize("command", ["run", "chat"])
def test_every_setting_has_a_flag(coli: Coli, command: str) -> None:
    text = coli(command, "--help").stdout
    assert [n for n in Settings.names_for("run") if f"--{n.replace('_', '-')} " not in text] == []


@pytest.mark.parametrize(
    ("command", "there", "missing"),
    [
        (["info"], ["--model", "--isa", "--mirror"], ["--ram", "--eviction"]),
        (["plan"], ["--model", "--ram", "--threads"], ["--mirror", "--heat"]),
        (["verify"], ["--model"], ["--ram", "--threads"]),
        (["bench", "kernels"], ["--threads", "--isa"], ["--model", "--ram", "--kv"]),
    ],
)
def test_a_command_has_the_settings_it_heeds(
    coli: Coli, command: list[str], there: list[str], missing: list[str]
) -> None:
    flags = set(re.findall(r"--[a-z-]+", coli(*command, "--help").stdout))
    assert flags >= set(there)
    assert flags & set(missing) == set()


@pytest.mark.parametrize(
    "command", [["run"], ["chat"], ["info"], ["convert"], ["bench", "kernels"]]
)
def test_help_shows_no_types_of_python(coli: Coli, command: list[str]) -> None:
    assert re.findall(r"<\w+", coli(*command, "--help").stdout) == []


def test_a_reply_ends_after_256_tokens_unless_it_is_told_otherwise(coli: Coli) -> None:
    coli.context_length = 1000
    assert len(json.loads(coli("run", "hi", "--json", "--ignore-eos").stdout)["token_ids"]) == 256
    coli.context_length = 100
    assert len(json.loads(coli("run", "hi", "--json", "--ignore-eos").stdout)["token_ids"]) == 98


def test_a_model_does_not_move_the_cursor_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Reply:
        completion = None

        def __enter__(self) -> "Reply":
            return self

        def __iter__(self) -> Iterator[Chunk]:
            return iter([Chunk("a\x1b[2J\n", (1,)), Chunk("\t\x07\x7f\x9b\r", (2,))])

        def __exit__(self, *_: object) -> None:
            return

    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    show(cast(Any, Reply()), Reporter())
    assert out.getvalue() == "a\ufffd[2J\n\t" + "\ufffd" * 4 + "\n"


def test_bad_values_are_told_before_the_model_is_opened(coli: Coli) -> None:
    result = coli("run", "hi", "--top-p", "7")
    assert (result.exit_code, coli.settings) == (2, None)
    assert result.stderr == "coli: error: --top-p is 7.0: it must be at least 0 and at most 1\n"


def interrupt_in_pass(number: int, model: FakeModel) -> None:
    def press(current: int, layer: int) -> None:
        if (current, layer) == (number, 1):
            os.kill(os.getpid(), signal.SIGINT)

    model.before_layer = press


def test_ctrl_c_stops_the_answer(coli: Coli) -> None:
    def prepare(model: FakeModel) -> None:
        model.says("hello", 2)
        interrupt_in_pass(4, model)

    coli.prepare = prepare
    handler = signal.getsignal(signal.SIGINT)
    result = coli("run", "hi")
    assert (result.exit_code, result.stdout) == (130, "hel\n")
    assert "3 tokens (cancelled)" in result.stderr
    assert signal.getsignal(signal.SIGINT) is handler
    assert coli.model.closed == 1


def test_ctrl_c_in_json_mode_still_gives_the_object(coli: Coli) -> None:
    coli.prepare = lambda model: interrupt_in_pass(2, model)
    result = coli("run", "hi", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["finish_reason"] == "cancelled"


def test_a_second_ctrl_c_leaves_at_once(coli: Coli) -> None:
    def press(_pass: int, _layer: int) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    coli.prepare = lambda model: setattr(model, "before_layer", press)
    result = coli("run", "hi")
    assert result.exit_code == 130
    assert result.stderr.endswith("coli: interrupted\n")


@pytest.mark.parametrize("flags", [[], ["--chat"]])
def test_text_for_a_model_without_a_tokenizer(coli: Coli, flags: list[str]) -> None:
    (coli.directory / "tokenizer.json").unlink()
    result = coli("run", "hi", *flags)
    assert result.exit_code == 3
    assert "has no tokenizer (tokenizer.json): give token ids with --ids" in result.stderr
