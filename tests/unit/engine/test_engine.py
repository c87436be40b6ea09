import gc
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from colibri.engine.engine import Engine
from colibri.engine.limits import tokens_allowed
from colibri.engine.request import FinishReason, SamplingParams
from colibri.errors import ContextLengthError, RequestError
from tests.unit.engine.counter import VOCAB, CounterModel, make_engine


@pytest.fixture
def model() -> CounterModel:
    return CounterModel()


@pytest.fixture
def engine(model: CounterModel) -> Engine:
    return make_engine(model, eos_ids=frozenset({100}))


def reply(engine: Engine, ids: Any, **params: Any) -> tuple[list[int], FinishReason | None]:
    generation = engine.generate(ids, SamplingParams(**params))
    tokens = list(generation)
    assert tokens == generation.token_ids
    return tokens, generation.finish_reason


def test_greedy_counts_on(engine: Engine) -> None:
    assert reply(engine, [3, 9], max_tokens=4) == ([10, 11, 12, 13], FinishReason.LENGTH)


def test_an_end_id_ends_the_reply_and_belongs_to_it(engine: Engine) -> None:
    assert reply(engine, [97]) == ([98, 99, 100], FinishReason.STOP)
    assert reply(engine, [97], stop_ids=(99,)) == ([98, 99], FinishReason.STOP)


def test_ignore_eos_goes_on_but_heeds_stop_ids(engine: Engine) -> None:
    ids = reply(engine, [98], ignore_eos=True, stop_ids=(102,))
    assert ids == ([99, 100, 101, 102], FinishReason.STOP)


def test_without_max_tokens_the_context_ends_the_reply(model: CounterModel) -> None:
    tokens, reason = reply(make_engine(model, context_length=64), [0] * 60)
    assert (tokens, reason) == ([1, 2, 3, 4], FinishReason.LENGTH)


def test_max_tokens_zero_computes_nothing(engine: Engine, model: CounterModel) -> None:
    assert reply(engine, [1], max_tokens=0) == ([], FinishReason.LENGTH)
    assert model.passes == []


def test_nothing_is_computed_in_vain(engine: Engine, model: CounterModel) -> None:
    reply(engine, [1, 2, 3], max_tokens=3)
    assert model.passes == [3, 1, 1]
    with engine.generate([1, 2, 3], SamplingParams()) as generation:
        assert next(generation) == 4
        generation.close(FinishReason.STOP)
    assert model.passes == [3, 1, 1, 3]
    assert generation.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("length", "max_tokens"), [(65, None), (65, 0), (64, None), (64, 1), (60, 5), (1, 10**9)]
)
def test_what_does_not_fit_is_refused_with_numbers(
    model: CounterModel, length: int, max_tokens: int | None
) -> None:
    engine = make_engine(model, context_length=64)
    with pytest.raises(ContextLengthError, match=rf"has {length} tokens?, .* holds 64") as error:
        engine.generate([0] * length, SamplingParams(max_tokens=max_tokens))
    advice = f"ask for at most {64 - length} (max_tokens)" if length < 64 else "shorten it"
    assert advice in str(error.value)
    assert model.passes == []


@pytest.mark.parametrize(("most", "advised"), [(None, True), (64, False), (65, True)])
def test_a_longer_context_is_advised_where_the_model_allows_it(
    most: int | None, advised: bool
) -> None:
    with pytest.raises(ContextLengthError) as error:
        tokens_allowed(2, 100, 64, most)
    assert ("raise context_length" in str(error.value)) is advised


@pytest.mark.parametrize(("length", "max_tokens"), [(63, None), (63, 1), (64, 0), (60, 4)])
def test_what_just_fits_is_served(model: CounterModel, length: int, max_tokens: int | None) -> None:
    engine = make_engine(model, context_length=64)
    tokens, _ = reply(engine, [0] * length, max_tokens=max_tokens)
    assert len(tokens) == (64 - length if max_tokens is None else max_tokens)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        ([1, VOCAB], rf"prompt\[1\] is {VOCAB}.* below {VOCAB}"),
        ([-1], r"prompt\[0\] is -1"),
        ([1.5], "integer token ids"),
        ([[1, 2]], "one flat sequence"),
        (["a"], "integer token ids"),
        (5, "one flat sequence"),
        ([True], "integer token ids"),
    ],
)
def test_bad_prompts_are_refused(engine: Engine, ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(ids, SamplingParams())
    with pytest.raises(RequestError, match=message):
        engine.logits(ids)


def test_stop_ids_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match=rf"stop_ids\[0\] is {VOCAB}"):
        engine.generate([1], SamplingParams(stop_ids=(VOCAB,)))


def test_biased_ids_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match=rf"logit_bias\[0\] is {VOCAB}"):
        engine.generate([1], SamplingParams(logit_bias={VOCAB: 1.0}))


def test_numpy_ids_are_welcome(engine: Engine) -> None:
    assert reply(engine, np.array([5], np.uint16), max_tokens=1)[0] == [6]


def test_a_seed_repeats_and_is_reported(engine: Engine) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=12)
    drawn = engine.generate([1], params)
    tokens = list(drawn)
    assert list(engine.generate([1], replace(params, seed=drawn.params.seed))) == tokens
    assert list(engine.generate([1], replace(params, seed=1))) != tokens


def test_cancel_between_tokens(engine: Engine, model: CounterModel) -> None:
    generation = engine.generate(
        [1], SamplingParams(), cancelled=lambda: len(generation.token_ids) == 2
    )
    assert list(generation) == [2, 3]
    assert generation.finish_reason is FinishReason.CANCELLED
    assert len(model.free) == model.kv.num_blocks


def test_cancel_in_prefill(engine: Engine) -> None:
    generation = engine.generate([1] * 40, SamplingParams(), cancelled=lambda: True)
    assert list(generation) == []
    assert generation.finish_reason is FinishReason.CANCELLED


def test_logits_are_teacher_forced(engine: Engine) -> None:
    logits = engine.logits([4, 90, 8])
    assert (logits.shape, logits.dtype) == ((3, VOCAB), np.float32)
    assert logits.argmax(axis=1).tolist() == [5, 91, 9]


def test_logits_fill_the_context_and_no_more(engine: Engine) -> None:
    assert len(engine.logits([0] * 128)) == 128
    with pytest.raises(ContextLengthError, match=r"129 ids, the context holds 128"):
        engine.logits([0] * 129)


def test_a_session_is_not_computed_again_and_changes_nothing(model: CounterModel) -> None:
    engine = make_engine(model)
    sampled = SamplingParams(temperature=1.5, seed=3, max_tokens=5)
    first = [1, 2, 3, 4]
    with engine.open_session() as session:
        answer = list(engine.generate(first, sampled, session=session))
        model.passes.clear()
        second = [*first, *answer, 50, 51]
        resumed = engine.generate(second, sampled, session=session)
        tokens = list(resumed)
        assert model.passes[0] == 3  # the answer's last token and the two new ones
        assert resumed.reused_tokens == resumed.metrics.reused_tokens == 8
        back = list(engine.generate([1, 2, 9], sampled, session=session))
    assert tokens == list(engine.generate(second, sampled))
    assert back == list(engine.generate([1, 2, 9], sampled))


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_abandoned_reply_gives_everything_back(
    engine: Engine, model: CounterModel, after: int
) -> None:
    free = sorted(model.free)
    gc.disable()
    try:
        generation = engine.generate([1], SamplingParams())
        for _ in range(after):
            next(generation)
        del generation
        assert sorted(model.free) == free
    finally:
        gc.enable()
    assert reply(engine, [1], max_tokens=1)[0] == [2]


def test_a_failing_pass_gives_everything_back(engine: Engine, model: CounterModel) -> None:
    def fail(number: int, _layer: int) -> None:
        if number == 2:
            raise OSError("disk")

    model.before_layer = fail
    free = sorted(model.free)
    with pytest.raises(OSError, match="disk"):
        list(engine.generate([1], SamplingParams()))
    assert sorted(model.free) == free
    assert reply(engine, [1], max_tokens=1)[0] == [2]


def test_one_thread_cannot_wait_for_itself(engine: Engine) -> None:
    with engine.generate([1], SamplingParams()) as generation:
        next(generation)
        with pytest.raises(RequestError, match="finish or close it first"):
            list(engine.generate([1], SamplingParams()))
        assert next(generation) == 3


def test_threads_take_turns(engine: Engine, model: CounterModel) -> None:
    results: dict[int, list[int]] = {}
    sampled = SamplingParams(temperature=2.0, seed=5, max_tokens=20)

    def ask(start: int) -> None:
        results[start] = list(engine.generate([start], sampled))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: list(engine.generate([n], sampled)) for n in range(8)}


def test_metrics_add_up(engine: Engine) -> None:
    generation = engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
    list(generation)
    one = generation.metrics
    assert (one.prompt_tokens, one.completion_tokens, one.decode_tokens) == (3, 4, 3)
    assert (one.experts.requests, one.experts.hits, one.experts.misses) == (12, 8, 4)
    assert one.expert_hit_rate == pytest.approx(2 / 3)
    assert one.experts.bytes_read == 4 * 4096
    assert one.decode_tokens_per_s == one.decode_tokens / one.decode_s
    reply(engine, [1], max_tokens=1)
    total = engine.metrics()
    assert (total.num_requests, total.prompt_tokens, total.completion_tokens) == (2, 4, 5)
    assert total.experts.requests == 15
    assert 0 < total.rss_bytes <= total.peak_rss_bytes
    figures = total.as_dict()
    assert figures["expert_hits"] + figures["expert_misses"] == figures["expert_requests"]
    assert {"bytes_read", "slack_bytes", "decode_tokens_per_s", "lossy"} <= figures.keys()


def test_metrics_of_nothing_have_no_rates(engine: Engine) -> None:
    metrics = engine.metrics()
    assert (metrics.decode_tokens_per_s, metrics.expert_hit_rate) == (None, None)


def test_close_ends_a_reply_in_the_middle(engine: Engine, model: CounterModel) -> None:
    free = sorted(model.free)
    generation = engine.generate([1], SamplingParams())
    next(generation)
    engine.close()
    assert sorted(model.free) == free
    assert list(generation) == []
    assert generation.finish_reason is FinishReason.CANCELLED
    with pytest.raises(RequestError, match="closed"):
        list(engine.generate([1], SamplingParams()))
