"""The tree of errors.

Every message names the file, tensor, key or field, what was wanted and found, and what to do next.

ColibriError
├── CheckpointError           a file of a checkpoint is broken, missing or contradicts another
│   ├── IncompleteModelError  shards or tensors are missing: nothing is generated from such a model
│   └── UnsupportedModelError a model_type, config key or tensor that would be computed wrongly
├── ConfigError               a config.json key is missing or has a wrong type or value
├── BudgetError               what was asked for does not fit the memory budget
├── SettingsError             an unknown or contradictory setting, flag or COLIBRI_* variable
├── RequestError              a request that cannot be honoured (parameters, stop strings, ids)
│   └── ContextLengthError    prompt (plus max_tokens) exceed the context
├── BusyError                 too many requests wait already: ask again later
├── ShuttingDownError         the engine takes no more requests
├── EngineDiedError           the engine's process ended under a request, or cannot be started
├── TextError                 tokenizer or chat template missing or unusable
├── ReadError                 the disk failed while an expert was read
├── WriteError                a file cannot be written: the disk is full, read-only or failing
├── HubError                  the hub has not what was asked for, or gave something else
├── NumericsError             a value that is not finite where it must be
├── NativeLibraryError        the kernel library is present but unusable
└── Cancelled                 the caller cancelled; not a failure
"""

from __future__ import annotations


class ColibriError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        exit_code: what the command line returns.
        members: sequences of a batch that it concerns, None where it concerns all.
    """

    exit_code = 1
    members: frozenset[int] | None = None


class CheckpointError(ColibriError):
    """A file of a checkpoint is broken or contradicts another; names file and tensor."""

    exit_code = 3


class IncompleteModelError(CheckpointError):
    """Shards or tensors are missing; the message gives found and expected counts."""


class UnsupportedModelError(CheckpointError):
    """A model_type, config key or tensor that would be computed wrongly, refused by name."""


class ConfigError(CheckpointError):
    """A key of config.json is missing or has a wrong type or value."""


class BudgetError(ColibriError):
    """What was asked for does not fit the budget; says by how much and what would."""

    exit_code = 4


class SettingsError(ColibriError):
    """An unknown or contradictory setting, flag or COLIBRI_* variable."""

    exit_code = 2


class RequestError(ColibriError):
    """A request that cannot be honoured, such as a parameter out of range."""

    exit_code = 2


class ContextLengthError(RequestError):
    """Prompt, or prompt plus max_tokens, do not fit the context."""


class BusyError(ColibriError):
    """Too many requests wait already.

    Attributes:
        retry_after_s: when asking again makes sense.
    """

    exit_code = 8

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDownError(ColibriError):
    """The engine takes no more requests; those that run may end."""

    exit_code = 8


class EngineDiedError(ColibriError):
    """The engine's process ended under a request, or cannot be started; says how it ended."""

    exit_code = 9


class TextError(ColibriError):
    """The tokenizer or the chat template is missing or unusable."""

    exit_code = 3


class ReadError(ColibriError):
    """The disk failed while an expert was read; ends that request only."""

    exit_code = 5


class WriteError(ColibriError):
    """A file cannot be written: the disk is full, read-only or failing; names the file."""

    exit_code = 5


class HubError(ColibriError):
    """The hub has not what was asked for, is silent, or gave other bytes than it promised."""

    exit_code = 10


class NumericsError(ColibriError):
    """A value that is not finite where it must be; names layer and position."""

    exit_code = 6


class NativeLibraryError(ColibriError):
    """The kernel library is present but unusable, for instance of another ABI version."""

    exit_code = 7


class Cancelled(ColibriError):  # noqa: N818  (a signal to unwind, not a failure)
    """The caller cancelled the request."""

    exit_code = 130
