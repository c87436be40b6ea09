"""What the engine's process and its client say to each other: token ids and numbers, never text.

A frame is the length of its body, four bytes big-endian, then the body: one message in MessagePack,
checked against its type when it is read. Nothing in a message is executed.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias, TypeVar

import msgspec

from colibri import errors
from colibri.engine.metrics import Metrics
from colibri.engine.request import FinishReason, GenerateRequest, SamplingParams

MAX_BODY_BYTES = 1 << 28
LENGTH = struct.Struct(">I")


class Message(msgspec.Struct, kw_only=True, tag=True):
    """Base of all messages; each is written with the name of its class."""


# What a client says.


class Open(Message):
    """The first message: load the model.

    Attributes:
        settings: fields of `colibri.settings.Settings` that are not the default.
        client_bytes: resident bytes of the program beside the engine, part of the `ram` budget.
        only_plan: say how memory would be divided, and end.
    """

    settings: dict[str, Any] = {}
    client_bytes: int = 0
    only_plan: bool = False


class Submit(Message):
    """Compute replies; answered by `Accepted` or `Failed`.

    Attributes:
        id: chosen by the client, never used again.
    """

    id: int
    request: GenerateRequest


class Cancel(Message):
    """Give up a request, or one of its replies; answered by `Finished` where it was running.

    Attributes:
        choice: which reply, None for all.
        reason: what it counts as: a stop string that was found is `STOP`.
    """

    id: int
    choice: int | None = None
    reason: FinishReason = FinishReason.CANCELLED


class AskMetrics(Message):
    """Answered by `MetricsAnswer` between two passes."""

    id: int


class Shutdown(Message):
    """Take no more requests; end when the running ones have, or at once."""

    at_once: bool = False


# What an engine says.


class Planned(Message):
    """Where every byte would go; nothing is loaded, and nothing more comes."""

    plan: dict[str, Any]


class Loading(Message):
    """How far loading has come: bytes, or 0 of 1."""

    stage: str
    done: int
    total: int


class Ready(Message):
    """The model is loaded.

    Attributes:
        max_sessions: replies that are computed together.
        max_waiting: requests that may wait beside them.
        plan: where every byte goes.
        lossy: settings that trade accuracy, as `setting=value`.
    """

    pid: int
    vocab_size: int
    context_length: int
    max_context_length: int | None
    eos_ids: tuple[int, ...]
    max_sessions: int
    max_waiting: int
    lossy: tuple[str, ...]
    plan: dict[str, Any]


class Accepted(Message):
    """The request is well-formed and queued.

    Attributes:
        params: what holds for it: the seed that was drawn, `max_tokens` filled in, the model's own
            end-of-turn ids among `stop_ids`.
    """

    id: int
    params: SamplingParams


class Started(Message):
    """Its turn has come.

    Attributes:
        reused_tokens: prompt ids whose state was still there.
    """

    id: int
    reused_tokens: int


class Prefill(Message):
    """Prompt tokens that are done, reused ones among them, and all of them."""

    id: int
    done: int
    total: int


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities, at one token.

    Attributes:
        chosen: of the token itself.
        top: the likeliest ids and theirs, descending, ties to the lower id.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class Tokens(Message):
    """New ids of one reply: one, or a span that its constraint forced.

    Attributes:
        logprobs: one for each id where they were asked for.
    """

    id: int
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None


class Finished(Message):
    """One reply has ended. A stop id is the last of its ids."""

    id: int
    choice: int
    reason: FinishReason


class Done(Message):
    """All replies of a request have ended: the last message about it.

    Attributes:
        metrics: of this request alone.
    """

    id: int
    metrics: Metrics


class Failed(Message):
    """The request, or loading, failed: the last message about it.

    Attributes:
        id: None where the engine cannot be started.
        error: name of a class in `colibri.errors`.
        retry_after_s: of a `BusyError`.
    """

    id: int | None
    error: str
    message: str
    retry_after_s: float | None = None


class MetricsAnswer(Message):
    """A snapshot."""

    id: int
    metrics: Metrics


ToEngine: TypeAlias = Open | Submit | Cancel | AskMetrics | Shutdown
ToClient: TypeAlias = (
    Planned
    | Loading
    | Ready
    | Accepted
    | Started
    | Prefill
    | Tokens
    | Finished
    | Done
    | Failed
    | MetricsAnswer
)
Event: TypeAlias = Started | Prefill | Tokens | Finished | Done

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def frame(message: Message) -> bytes:
    """A message as it goes over the wire.

    Raises:
        RequestError: it holds an integer of more than 64 bits.
    """
    try:
        body = _encoder.encode(message)
    except OverflowError as error:
        raise errors.RequestError(
            f"the request holds a number that is too large: {error}"
        ) from error
    return LENGTH.pack(len(body)) + body


def to_engine(body: bytes) -> ToEngine:
    """A client's message.

    Raises:
        RequestError: it is none, or holds a value that is not allowed.
    """
    return _decoded(_to_engine, body)


def to_client(body: bytes) -> ToClient:
    """An engine's message; raises as `to_engine`."""
    return _decoded(_to_client, body)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise errors.RequestError(f"a message cannot be read: {error}") from error


def failed(error: BaseException, id: int | None) -> Failed:
    """What to say of an error; one that is not ours keeps its type in the message."""
    if isinstance(error, errors.ColibriError):
        kind, message = type(error).__name__, str(error)
    else:
        kind, message = "ColibriError", f"{type(error).__name__}: {error}"
    retry = error.retry_after_s if isinstance(error, errors.BusyError) else None
    return Failed(id=id, error=kind, message=message, retry_after_s=retry)


def raised(message: Failed) -> errors.ColibriError:
    """The error that a message tells of."""
    if message.error == errors.BusyError.__name__:
        return errors.BusyError(message.message, message.retry_after_s or 1.0)
    kind = getattr(errors, message.error, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.ColibriError)):
        return errors.ColibriError(f"{message.error}: {message.message}")
    return kind(message.message)
