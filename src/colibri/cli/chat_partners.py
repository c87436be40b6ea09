"""Who answers in `coli chat`: a model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from colibri.checkpoint.hub.names import title
from colibri.cli.progress import Reporter
from colibri.cli.report import footer, say

if TYPE_CHECKING:
    from colibri.engine.session import Session
    from colibri.llm import LLM
    from colibri.text.dialects import Event

Messages = Sequence[Mapping[str, Any]]
Cancelled = Callable[[], bool]
_TAIL = 32  # ids whose text shows what the end of a prompt has opened


class Partner(Protocol):
    """Answers conversations.

    Attributes:
        name: of the model.
        continues: it has no chat template, and only goes on with text.
        footer: about the last answer, one line.
    """

    name: str
    continues: bool
    footer: str

    def answer(
        self, messages: Messages, sampling: Mapping[str, Any], cancelled: Cancelled
    ) -> Iterator[Event]:
        """What the answer consists of, as it comes.

        Raises:
            ColibriError: it cannot be given; the message says why.
        """

    def count(self, messages: Messages) -> str:
        """How many tokens the conversation has, in words."""

    def stats(self) -> str:
        """What has happened so far, in words."""


def continued(messages: Messages) -> str:
    """A conversation with a model that has no chat template: one text."""
    return "".join(message["content"] for message in messages)


class LocalPartner:
    """The model is in this process; its state is kept between turns."""

    def __init__(self, llm: LLM, session: Session, reporter: Reporter) -> None:
        self.name = title(llm.prepared.directory)
        self.continues = not llm.has_chat_template
        self.footer = ""
        self._llm, self._session, self._reporter = llm, session, reporter

    def answer(
        self, messages: Messages, sampling: Mapping[str, Any], cancelled: Cancelled
    ) -> Iterator[Event]:
        """See `Partner.answer`; a model without a tokenizer cannot talk."""
        from colibri.engine.request import FinishReason
        from colibri.text.reply import ReplyReader

        llm, prepared = self._llm, self._llm.prepared
        ids = self._ids(messages)
        tokenizer = prepared.tokenizer
        assert tokenizer is not None  # or there were no ids of a text
        reader = ReplyReader(
            tokenizer,
            None if self.continues else prepared.dialect,
            prompt=tokenizer.decode(ids[-_TAIL:], skip_special=False),
            stop=tuple(sampling.get("stop") or ()),
        )
        options: Any = {k: v for k, v in sampling.items() if k != "stop"}
        held = self._session.common_prefix(ids)
        stream = llm.stream(
            ids, session=self._session, progress=self._reporter.prompt, cancelled=cancelled,
            **options,
        )  # fmt: skip
        with stream:
            stop_ids = stream.completion.params.stop_ids
            for chunk in stream:
                if held < len(ids):  # it is said once
                    reused = stream.completion.metrics.reused_tokens
                    self._say_resumed(held, reused, len(ids))
                    held = len(ids)
                for token in chunk.token_ids:
                    yield from [] if token in stop_ids else reader.push(token)
                if reader.matched is not None:
                    stream.close(FinishReason.STOP)
                    break
        yield from reader.finish()
        self.footer = footer(stream.completion, llm.metrics())

    def _say_resumed(self, held: int, reused: int, total: int) -> None:
        """Tell where more was still there than this session held: it was on disk."""
        if reused > held:
            self._reporter.close()
            say(f"Resumed: {reused:,} of {total:,} prompt tokens were kept on disk.")

    def _ids(self, messages: Messages) -> list[int]:
        if self.continues:
            return list(self._llm.encode(continued(messages)))
        return self._llm.encode_chat(messages)

    def count(self, messages: Messages) -> str:
        """See `Partner.count`."""
        most = self._llm.plan().context_length
        number = len(self._ids(messages)) if messages else 0
        return f"{number:,} of {most:,} tokens"

    def stats(self) -> str:
        """See `Partner.stats`."""
        total = self._llm.metrics()
        hits = total.expert_hit_rate
        return (
            f"{total.num_requests} answers, {total.completion_tokens:,} tokens; of "
            f"{total.prompt_tokens:,} prompt tokens {total.reused_tokens:,} were still there"
            + ("" if hits is None else f"; experts {hits:.0%} from memory")
        )
