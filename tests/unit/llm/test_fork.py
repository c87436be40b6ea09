"""A forked child either opens its own model or is told to; it never hangs and never saves."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from colibri import LLM
from colibri.errors import RequestError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
PROMPT = [17, 200, 3, 88]


def in_child(does: Callable[[], bool]) -> bool:
    """Whether a child does it, within a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        done = False
        try:
            done = does()
        finally:
            os._exit(0 if done else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def reply(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, max_tokens=5, ignore_eos=True).token_ids)


@pytest.mark.parametrize("slots", [8, "100%"])
def test_in_the_middle_of_a_reply(tiny: Path, slots: int | str) -> None:
    """The child gets the parent's engine with its turn taken, and reads that will never land."""
    with LLM.open(tiny, expert_slots=slots, threads=2) as llm:
        expected = reply(llm)

        def is_refused() -> bool:
            try:
                reply(llm)
            except RequestError as error:
                llm.close()
                return "open it again in the child" in str(error)
            return False

        def opens_its_own() -> bool:
            with LLM.open(tiny, expert_slots=slots, threads=2) as own:
                return reply(own) == expected

        with llm.stream(PROMPT, max_tokens=5, ignore_eos=True) as stream:
            next(stream)
            assert in_child(is_refused)
            assert in_child(opens_its_own)
            for _ in stream:
                pass
        assert list(stream.completion.token_ids) == expected
