"""Rows of a table that one test goes through."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*row: object) -> Iterator[None]:
    """A failure within says which row it is about."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the case: {', '.join(map(repr, row))}"[:1000])
        raise
