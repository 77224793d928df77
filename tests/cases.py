"""Tables that one test goes through, row by row."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def case(*row: object) -> Iterator[None]:
    """A failure within says which row it is about."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the case: {', '.join(map(repr, row))}"[:1000])
        raise


def rows(names: str | tuple[str, ...], table: Iterable[Any]) -> Callable[[Any], Any]:
    """As pytest.mark.parametrize, with one test for all rows: where there are many small ones,
    to set each up takes longer than the check. They share the test's fixtures.
    """
    table = list(table)
    assert table

    def of(check: Any) -> Any:
        signature = inspect.signature(check)
        own = (names,) if isinstance(names, str) else names
        others = [each for name, each in signature.parameters.items() if name not in own]

        def given(row: Any) -> dict[str, Any]:
            return {names: row} if isinstance(names, str) else dict(zip(names, row, strict=True))

        @functools.wraps(check)
        def one_by_one(*args: Any, **fixtures: Any) -> None:
            for row in table:
                with case(row):
                    check(*args, **fixtures, **given(row))

        @functools.wraps(check)
        async def awaited(*args: Any, **fixtures: Any) -> None:
            for row in table:
                with case(row):
                    await check(*args, **fixtures, **given(row))

        test = awaited if inspect.iscoroutinefunction(check) else one_by_one
        test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return test

    return of
