"""A test of many rows is one test, which fails with the row that it was at."""

import asyncio
import inspect

import pytest

from tests.cases import rows

SEEN: list[int] = []


@rows("number", [1, 2, 3])
def small(limit, number):
    SEEN.append(number)
    assert number < limit


@rows(("number", "less"), [(1, 0), (2, 1)])
async def awaited(number, less):
    await asyncio.sleep(0)
    assert number - less == 1


def test_each_row_is_checked_with_the_fixtures_that_are_left():
    assert [*inspect.signature(small).parameters] == ["limit"]
    SEEN.clear()
    small(limit=4)
    assert SEEN == [1, 2, 3]


async def test_so_are_those_of_a_coroutine():
    assert not inspect.signature(awaited).parameters
    await awaited()


def test_a_failure_names_its_row():
    with pytest.raises(AssertionError) as raised:
        small(limit=2)
    assert raised.value.__notes__ == ["the case: 2"]


def test_a_table_without_rows_is_a_mistake():
    with pytest.raises(AssertionError):
        rows("number", [])
