"""A test of many rows is one test, which fails with the row that it was at."""

import inspect

import pytest

from tests.cases import rows


@rows(("number", "less"), [(1, 0), (2, 1), (3, 1)])
async def check(limit, number, less):
    assert number - less < limit


async def test_rows_share_fixtures_and_failure_names_one():
    assert [*inspect.signature(check).parameters] == ["limit"]
    await check(limit=3)
    with pytest.raises(AssertionError) as raised:
        await check(limit=2)
    assert raised.value.__notes__ == ["the case: (3, 1)"]
