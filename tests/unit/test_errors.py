"""One tree of errors, and exit codes by which a script tells them apart."""

import inspect

import pytest

import colibri.errors
from colibri.errors import (
    BudgetError,
    BusyError,
    Cancelled,
    CheckpointError,
    ColibriError,
    ConfigError,
    ContextLengthError,
    EngineDiedError,
    HubError,
    IncompleteModelError,
    NativeLibraryError,
    NumericsError,
    ReadError,
    RequestError,
    SettingsError,
    ShuttingDownError,
    TextError,
    UnsupportedModelError,
    WriteError,
)

ALL = [
    found
    for _, found in inspect.getmembers(colibri.errors, inspect.isclass)
    if issubclass(found, Exception)
]


def test_every_error_is_ours() -> None:
    assert len(ALL) == 19
    assert all(issubclass(error, ColibriError) for error in ALL)


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_no_error_looks_like_success(error: type[ColibriError]) -> None:
    assert 0 < error.exit_code < 256
    assert error.__doc__


@pytest.mark.parametrize(
    ("error", "parent", "code"),
    [
        (ColibriError, Exception, 1),
        (CheckpointError, ColibriError, 3),
        (IncompleteModelError, CheckpointError, 3),
        (UnsupportedModelError, CheckpointError, 3),
        (ConfigError, CheckpointError, 3),
        (BudgetError, ColibriError, 4),
        (SettingsError, ColibriError, 2),
        (RequestError, ColibriError, 2),
        (ContextLengthError, RequestError, 2),
        (TextError, ColibriError, 3),
        (WriteError, ColibriError, 5),
        (HubError, ColibriError, 10),
        (BusyError, ColibriError, 8),
        (ShuttingDownError, ColibriError, 8),
        (EngineDiedError, ColibriError, 9),
        (ReadError, ColibriError, 5),
        (NumericsError, ColibriError, 6),
        (NativeLibraryError, ColibriError, 7),
        (Cancelled, ColibriError, 130),
    ],
)
def test_the_tree(error: type[ColibriError], parent: type[Exception], code: int) -> None:
    assert error.__bases__ == (parent,)
    assert error.exit_code == code


def test_the_docstring_draws_the_whole_tree() -> None:
    assert all(error.__name__ in str(colibri.errors.__doc__) for error in ALL)
