"""`coli eval tasks`: questions with several answers, chosen by likelihood.

A task is a file of JSON, one question a line: `{"context": "…", "choices": ["…", …], "answer": 0}`;
other keys are left aside. An answer's likelihood is that of its tokens behind the context. `acc`
counts where the likeliest answer is the right one, `acc_norm` where the likeliest per character is:
the two readings of the lm-evaluation-harness, of which the leaderboards' figures are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colibri.engine.session import Session
from colibri.errors import RequestError, TextError
from colibri.lab.envelope import Envelope
from colibri.lab.eval_ledger import Ledger, identity
from colibri.lab.eval_ppl import FOLDER
from colibri.lab.eval_text import OWN_BYTES, Window, log_probabilities, surprise
from colibri.llm import LLM
from colibri.llm.loading import LoadProgress
from colibri.settings import Settings
from colibri.text import Tokenizer

SCHEMA = "colibri.eval.tasks/1"
DELIMITER = " "


@dataclass(frozen=True, slots=True)
class Question:
    """One line of a task."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How a task went.

    Attributes:
        path: its file.
        num_questions: that were asked.
        num_lines: that the file has.
        resumed: questions that an earlier run had asked.
        right: questions answered rightly by the sum of log-likelihoods.
        right_norm: by that sum per character of the answer.
    """

    path: Path
    num_questions: int
    num_lines: int
    resumed: int
    right: int
    right_norm: int

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it; `stderr` is the standard error of a share."""
        n = self.num_questions
        acc, norm = self.right / n, self.right_norm / n
        return {
            "task": str(self.path),
            "questions": n,
            "questions_of_task": self.num_lines,
            "questions_resumed": self.resumed,
            "acc": acc,
            "acc_stderr": _stderr(acc, n),
            "acc_norm": norm,
            "acc_norm_stderr": _stderr(norm, n),
        }


def _stderr(share: float, n: int) -> float | None:
    return None if n < 2 else math.sqrt(share * (1 - share) / (n - 1))


def eval_tasks(
    tasks: Sequence[Path],
    settings: Settings,
    progress: LoadProgress,
    *,
    limit: int | None = None,
    delimiter: str = DELIMITER,
) -> Envelope:
    """How many questions of each task a model answers rightly.

    `limit` is the most questions of a task that are asked, the first ones. `delimiter` is put
    between context and answer where neither has a blank there.

    Raises:
        RequestError: a task cannot be read, or has a line that is no question.
        ContextLengthError: a question does not fit the context.
        TextError: the model has no tokenizer.
        CheckpointError, SettingsError, BudgetError: as opening a model raises them.
    """
    read = [(path, read_task(path)) for path in tasks]
    with LLM.from_settings(settings, progress, OWN_BYTES) as llm:
        if llm.prepared.tokenizer is None:
            raise TextError(f"{llm.prepared.directory} has no tokenizer (tokenizer.json)")
        results = [
            _scores(llm, path, asked, limit, delimiter, progress).as_dict() for path, asked in read
        ]
    return Envelope(schema=SCHEMA, settings=settings.as_dict(), ceilings={}, results=results)


def read_task(path: Path) -> list[Question]:
    """The questions of a file.

    Raises:
        RequestError: it cannot be read, or a line is no question; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}: name a file of questions") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path}: is no UTF-8: give questions as JSON, one a line") from None
    found = [_question(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise RequestError(f"{path}: holds no question: give one a line, as JSON")
    return found


def _question(path: Path, number: int, line: str) -> Question:
    where = f"{path}, line {number}"
    try:
        given = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where}: is no JSON: {error}") from None
    wanted = 'give {"context": "…", "choices": ["…", "…"], "answer": 0}'
    if not isinstance(given, dict):
        raise RequestError(f"{where}: is {type(given).__name__}: {wanted}")
    context, choices, answer = (given.get(key) for key in ("context", "choices", "answer"))
    if not isinstance(context, str):
        raise RequestError(f"{where}: context is {context!r}: {wanted}")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise RequestError(f"{where}: choices are {choices!r}: {wanted}")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise RequestError(
            f"{where}: answer is {answer!r}: give the number of the right choice, "
            f"0 to {len(choices) - 1}"
        )
    return Question(context, tuple(choices), answer)


def _scores(
    llm: LLM,
    path: Path,
    questions: list[Question],
    limit: int | None,
    delimiter: str,
    progress: LoadProgress,
) -> Scores:
    asked, right, right_norm = questions[:limit], 0, 0
    digest = hashlib.blake2b(repr((asked, delimiter)).encode(), digest_size=16).hexdigest()
    with Ledger(llm.settings.cache / FOLDER, identity(llm.prepared, "tasks", digest)) as ledger:
        resumed = ledger.num_resumed
        for number, question in enumerate(asked):
            progress(f"asking {path.name}", number, len(asked))
            if number >= resumed:
                ledger.add({"log_likelihoods": _ask(llm, question, delimiter, path, number)})
            sums = np.array(ledger.found[number]["log_likelihoods"])
            lengths = np.array([len(choice) for choice in question.choices])
            right += int(sums.argmax() == question.answer)
            right_norm += int((sums / lengths).argmax() == question.answer)
        progress(f"asking {path.name}", len(asked), len(asked))
        ledger.finish()
    return Scores(
        path=path,
        num_questions=len(asked),
        num_lines=len(questions),
        resumed=resumed,
        right=right,
        right_norm=right_norm,
    )


def _ask(llm: LLM, question: Question, delimiter: str, path: Path, number: int) -> list[float]:
    """The log-likelihood of each answer; what they share of the context is computed once."""
    tokenizer = llm.prepared.tokenizer
    assert tokenizer is not None
    windows = [
        continuation(tokenizer, question.context, choice, delimiter) for choice in question.choices
    ]
    longest = max(len(window.ids) for window in windows) - 1
    if longest > llm.plan().context_length:
        raise RequestError(
            f"{path}, question {number + 1}: has {longest} tokens, the context holds "
            f"{llm.plan().context_length}: raise context_length, or leave the question out"
        )
    with llm.open_session() as session:
        return [_log_likelihood(llm, window, session) for window in windows]


def continuation(tokenizer: Tokenizer, context: str, choice: str, delimiter: str) -> Window:
    """A context and an answer as ids; the answer's are foretold.

    Blanks at the context's end go to the answer, whose first token most vocabularies begin with
    them. Ids of both together are cut where those of the context alone end. Without a context the
    first token has nothing before it but what prompts begin with, or stands for it.
    """
    bare = context.rstrip()
    between = context[len(bare) :]
    if not between and context and not choice[0].isspace():
        between = delimiter
    start = tokenizer.encode_prompt("", special=False)
    whole = tokenizer.encode(bare + between + choice)
    first = len(start) + min(len(tokenizer.encode(bare)), len(whole) - 1)
    return Window([*start, *whole], max(1, first))


def _log_likelihood(llm: LLM, window: Window, session: Session) -> float:
    parts = log_probabilities(llm, window, session)
    return -sum(float(surprise(targets, log_probs).sum()) for targets, log_probs in parts)
