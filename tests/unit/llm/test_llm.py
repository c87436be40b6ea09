import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.engine.request import FinishReason
from colibri.errors import ContextLengthError, RequestError, SettingsError, TextError
from colibri.llm import LLM, Completion
from tests.unit.llm.fakes import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    THINK,
    USER,
    FakeModel,
    make_llm,
    write_tokenizer,
)

ANSWERS = [
    "plain words",
    "an emoji 🐦 in the middle and at the end 🐦",
    b"never a character: \xf0\x9f\x90",
    b"broken \xff\xfe bytes \xe2\x82 between",
    [THINK, *b"thought", END_THINK, *b"said"],
    [THINK, *b"never closed"],
    [THINK, *b"twice", END_THINK, END_THINK, *b"said"],
    "\ufffd is a real letter here",
    "",
]


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    write_tokenizer(directory)
    return directory


@pytest.fixture
def opened(text_dir: Path) -> tuple[LLM, FakeModel]:
    return make_llm(text_dir)


def asked(llm: LLM, model: FakeModel, answer: Any, **options: Any) -> Completion:
    model.says(answer, 2)
    return llm.generate("hi", **options)


def test_generate(opened: tuple[LLM, FakeModel]) -> None:
    llm, model = opened
    reply = asked(llm, model, "hello")
    assert reply.text == "hello"
    assert reply.token_ids == [*b"hello", EOS]
    assert (reply.prompt_tokens, reply.completion_tokens) == (2, 6)
    assert (reply.finish_reason, reply.stop) == (FinishReason.STOP, None)
    assert reply.metrics.experts.requests == 4 * len(model.passes)


def test_ids_and_text_are_the_same_prompt(opened: tuple[LLM, FakeModel]) -> None:
    llm, model = opened
    model.says("hello", 2)
    assert llm.generate([*b"hi"]).token_ids == llm.generate("hi").token_ids
    assert llm.generate(np.array([*b"hi"])).text == "hello"


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("stop", [None, "ai", ["d", "mid"], "🐦", "zzz"])
def test_stream_equals_generate(opened: tuple[LLM, FakeModel], answer: Any, stop: Any) -> None:
    llm, model = opened
    whole = asked(llm, model, answer, stop=stop)
    stream = llm.stream("hi", stop=stop)
    chunks = list(stream)
    assert "".join(chunk.text or "" for chunk in chunks) == whole.text == stream.completion.text
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert ids == whole.token_ids == stream.completion.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is whole.finish_reason


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=3), max_size=3))
@settings(max_examples=60, deadline=None)
def test_stop_strings_cut_where_a_search_would(
    text_dir: Path, answer: str, stops: list[str]
) -> None:
    llm, model = make_llm(text_dir)
    reply = asked(llm, model, answer, stop=stops)
    hits = [(answer.find(s) + len(s), answer.find(s)) for s in stops if s in answer]
    assert reply.text == (answer[: min(hits)[1]] if hits else answer)
    assert reply.finish_reason is FinishReason.STOP
    assert (reply.stop is not None) == bool(hits)


@pytest.mark.parametrize("stop", [None, "", []])
def test_no_stop_strings(opened: tuple[LLM, FakeModel], stop: Any) -> None:
    llm, model = opened
    assert asked(llm, model, "hello", stop=stop).text == "hello"


def test_a_stop_string_over_several_tokens_computes_nothing_in_vain(
    opened: tuple[LLM, FakeModel],
) -> None:
    llm, model = opened
    reply = asked(llm, model, "one STOP two", stop=["STOP", "STOPPED"])
    assert (reply.text, reply.stop) == ("one ", "STOP")
    assert reply.token_ids == [*b"one STOP"]
    assert reply.completion_tokens == len(model.passes) == 8


def test_a_stop_string_in_the_prompt_does_not_count(opened: tuple[LLM, FakeModel]) -> None:
    llm, model = opened
    assert asked(llm, model, "hello", stop="hi").text == "hello"


def test_the_first_token_may_be_the_stop(opened: tuple[LLM, FakeModel]) -> None:
    llm, model = opened
    reply = asked(llm, model, "x", stop="x")
    assert (reply.text, reply.token_ids) == ("", [*b"x"])


def test_stop_ids_are_not_in_the_text(opened: tuple[LLM, FakeModel]) -> None:
    llm, model = opened
    reply = asked(llm, model, "hello", stop_ids=[ord("l")])
    assert (reply.text, reply.token_ids) == ("he", [*b"hel"])


def test_end_ids_are_those_of_all_three_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [301, 302]}')
    llm, _ = make_llm(tmp_path, eos_token_id=(303,))
    assert llm.prepared.eos_ids == {301, 302, 303, EOS}
    assert llm.generate([300]).token_ids == [301]
    assert llm.generate([302]).token_ids == [303]
    assert len(llm.generate([300], ignore_eos=True, max_tokens=5).token_ids) == 5


def test_chat_uses_the_template_and_stops_at_the_end_of_turn(
    opened: tuple[LLM, FakeModel],
) -> None:
    llm, model = opened
    ids = llm.encode_chat([{"role": "user", "content": "hi </s>"}])
    assert ids == [BOS, USER, *b"hi </s>", ASSISTANT]
    model.says("hello", len(ids))
    assert llm.chat([{"role": "user", "content": "hi </s>"}]).text == "hello"


@pytest.mark.parametrize("messages", ["hi", ["hi"], [{"content": "hi"}]])
def test_malformed_conversations_are_refused(opened: tuple[LLM, FakeModel], messages: Any) -> None:
    with pytest.raises(RequestError, match="messages must be"):
        opened[0].chat(messages)


def test_without_a_template_chat_is_refused_by_name(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat=False)
    llm, _ = make_llm(tmp_path)
    assert not llm.has_chat_template
    with pytest.raises(TextError, match=r"no chat template: it is a plain continuation model"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_without_a_tokenizer_ids_work_and_text_fails_by_name(tmp_path: Path) -> None:
    llm, _ = make_llm(tmp_path)
    reply = llm.generate([1, 2], max_tokens=2)
    assert (reply.text, reply.token_ids) == (None, [3, 4])
    assert [chunk.text for chunk in llm.stream([1], max_tokens=1)] == [None, None]
    with pytest.raises(TextError, match=r"a text prompt needs a tokenizer.*tokenizer\.json"):
        llm.generate("hi")
    with pytest.raises(TextError, match="a stop string needs a tokenizer"):
        llm.generate([1], stop="x")
    with pytest.raises(TextError, match="a conversation needs a tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_an_empty_prompt_becomes_the_first_token_of_all(opened: tuple[LLM, FakeModel]) -> None:
    llm, model = opened
    model.says("hello", 1)
    reply = llm.generate("")
    assert (reply.text, reply.prompt_tokens) == ("hello", 1)
    with pytest.raises(RequestError, match="empty"):
        llm.generate([])


def test_two_prompts_that_differ_beyond_the_context_are_both_refused(text_dir: Path) -> None:
    llm, _ = make_llm(text_dir, context_length=64)
    for tail in ("x", "y"):
        with pytest.raises(ContextLengthError, match=r"101 tokens.* holds 64"):
            llm.generate("a" * 100 + tail)


def test_unknown_arguments_get_a_suggestion(opened: tuple[LLM, FakeModel]) -> None:
    with pytest.raises(RequestError, match="unknown argument temprature: did you mean temperature"):
        opened[0].generate("hi", temprature=1)  # type: ignore[call-arg]


def test_the_model_is_given_once(text_dir: Path) -> None:
    with pytest.raises(RequestError, match="not both"):
        LLM.open(text_dir, model="other")


def test_without_a_model_the_message_says_how_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLIBRI_MODEL", raising=False)
    monkeypatch.setattr("colibri.llm.location.BUNDLED", Path("nowhere"))
    with pytest.raises(SettingsError, match=r"tools/make_checkpoint\.py"):
        LLM.open()


def test_logits(opened: tuple[LLM, FakeModel]) -> None:
    logits = opened[0].logits([4, 90])
    assert (logits.shape, logits.dtype) == ((2, 512), np.float32)
    assert logits.argmax(axis=1).tolist() == [5, 91]


def test_leaving_a_stream_early_gives_everything_back(opened: tuple[LLM, FakeModel]) -> None:
    llm, model = opened
    free = sorted(model.free)
    gc.disable()
    try:
        for chunk in llm.stream([1]):
            assert chunk.token_ids == (2,)
            break
        assert sorted(model.free) == free
    finally:
        gc.enable()
    with llm.stream([1]) as stream:
        next(stream)
    assert sorted(model.free) == free
    assert stream.completion.token_ids == [2]
    assert stream.completion.finish_reason is FinishReason.CANCELLED


def test_cancel(opened: tuple[LLM, FakeModel]) -> None:
    llm, model = opened
    reply = asked(llm, model, "hello", cancelled=lambda: len(model.passes) == 3)
    assert (reply.text, reply.finish_reason) == ("he", FinishReason.CANCELLED)


def test_a_session_is_reused(opened: tuple[LLM, FakeModel]) -> None:
    llm, model = opened
    with llm.open_session() as session:
        llm.generate([1, 2, 3], max_tokens=2, session=session)
        model.passes.clear()
        reply = llm.generate([1, 2, 3, 4, 5, 6], max_tokens=1, session=session)
    assert model.passes == [2]
    assert reply.metrics.reused_tokens == 4


def test_close_twice_and_nothing_after(opened: tuple[LLM, FakeModel]) -> None:
    llm, model = opened
    with llm:
        pass
    llm.close()
    assert model.closed == 1
    for call in (lambda: llm.generate([1]), lambda: llm.logits([1]), llm.metrics):
        with pytest.raises(RequestError, match="closed"):
            call()


def test_metrics_sum_up(opened: tuple[LLM, FakeModel]) -> None:
    llm, model = opened
    asked(llm, model, "hello")
    asked(llm, model, "hello")
    metrics = llm.metrics()
    assert (metrics.num_requests, metrics.completion_tokens) == (2, 12)
    assert metrics.ram_budget_bytes == llm.plan().budget_bytes
