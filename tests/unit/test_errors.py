"""The errors: one base, the built-in that fits, and messages with numbers."""

from __future__ import annotations

import pickle

import pytest

from radixkv import mem_cache
from radixkv.mem_cache import (
    BatchRefusedError,
    CacheBusyError,
    ConfigError,
    DoubleFreeError,
    ForeignPageError,
    IntegrityError,
    LengthError,
    OutOfContentsError,
    OutOfPagesError,
    PageError,
    PagesInUseError,
    RadixKVError,
    RequestStateError,
    StalledError,
    TokenError,
    WrongThreadError,
    errors,
)

ERRORS = [
    value
    for value in vars(mem_cache).values()
    if isinstance(value, type) and issubclass(value, Exception)
]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_the_one_base(error: type[Exception]) -> None:
    assert issubclass(error, RadixKVError)


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_stands_in_the_tree_of_the_docstring(
    error: type[Exception],
) -> None:
    assert error.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ConfigError, ValueError),
        (TokenError, ValueError),
        (LengthError, ValueError),
        (PageError, ValueError),
        (DoubleFreeError, PageError),
        (ForeignPageError, PageError),
        (OutOfPagesError, MemoryError),
        (OutOfContentsError, MemoryError),
        (PagesInUseError, RuntimeError),
        (RequestStateError, RuntimeError),
        (CacheBusyError, RuntimeError),
        (StalledError, CacheBusyError),
        (BatchRefusedError, ConfigError),
        (WrongThreadError, RuntimeError),
        (IntegrityError, RuntimeError),
    ],
)
def test_errors_inherit_the_built_in_that_fits(
    error: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(error, builtin)


def test_out_of_pages_says_where_the_pages_are() -> None:
    error = OutOfPagesError(needed=9, available=1, evictable=2, protected=3, held=4)

    assert str(error) == (
        "need 9 pages, got 1 free and 2 evictable (3 are protected, 4 held by "
        "running requests)"
    )


def test_pages_in_use_says_how_many_are_needed() -> None:
    assert str(PagesInUseError(needed=6, available=4)) == (
        "cannot shrink to 4 pages: those in use need at least 6"
    )


@pytest.mark.parametrize(
    "error",
    [
        OutOfPagesError(9, 1, 2, 3, 4),
        OutOfContentsError(5, 2),
        PagesInUseError(6, 4),
        TokenError("no"),
    ],
)
def test_errors_cross_a_process_border(error: RadixKVError) -> None:
    copy = pickle.loads(pickle.dumps(error))

    assert vars(error) == vars(copy)
    assert str(error) == str(copy)
