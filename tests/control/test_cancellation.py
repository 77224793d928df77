"""A caller may go away at any moment; the books stay right and the next load works."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from adapter.core.model import ModelId, ModelSource
from adapter.runtime.threads import PROCESSES
from tests.cases import case
from tests.fakes.house import House

# more turns of the loop than any operation here takes; the last test makes sure
TURNS = 40


@pytest.fixture(autouse=True)
def _without_threads(monkeypatch):
    """A thread answers after as many turns of the loop as it pleases. With its work done on the
    spot, and one turn for the answer, each number of turns is the same moment of an operation in
    every run.
    """

    async def run(act: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        return act(*args)

    monkeypatch.setattr(PROCESSES, "run", run)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def leave(house: House, work: Coroutine[Any, Any, Any], after: int) -> None:
    """Call, go away after so many turns of the loop, and let the operation end."""
    caller = house.begin(work)
    await turns(after)
    caller.cancel()
    await asyncio.wait({caller})
    await house.quiet()


async def test_a_caller_who_leaves_a_load_leaves_registry_and_ledger_consistent():
    for after in range(TURNS):
        with case(after):
            house = await House(limit=1000).open()
            await leave(house, house.load("m"), after)
            house.check(
                *(["m"] if after else [])
            )  # cancelled before its first turn, it never began
            if after:
                await house.unload("m")
            await house.load("m")
            house.check("m")
            await house.close()


async def test_a_caller_who_leaves_an_unload_leaves_registry_and_ledger_consistent():
    for after in range(TURNS):
        with case(after):
            house = await House(limit=1000).open()
            await house.load("m")
            await leave(house, house.unload("m"), after)
            house.check(*([] if after else ["m"]))
            if after:
                await house.load("m")
            house.check("m")
            await house.close()


async def test_an_operation_that_is_cut_off_itself_undoes_what_it_began():
    """What asyncio does to every task when the process ends before the drain is over."""
    for after in range(2, TURNS):  # from its own first turn on
        with case(after):
            house = await House(limit=1000).open()
            before = asyncio.all_tasks()
            caller = house.begin(house.load("m"))
            await turns(after)
            operation = asyncio.all_tasks() - before - {caller}
            for task in operation:
                task.cancel()
            await asyncio.gather(caller, return_exceptions=True)
            house.check(*house.listed())
            assert house.listed() in ([], ["m"])
            await house.close()


async def test_a_whole_load_and_a_whole_unload_take_fewer_turns_than_are_tried():
    house = await House(limit=1000).open()
    load = house.begin(house.load("m"))
    await turns(TURNS - 1)
    assert load.done()
    unload = house.begin(house.unload("m"))
    await turns(TURNS - 1)
    assert unload.done()
    await house.close()


async def test_what_a_load_brought_is_not_kept_once_it_is_loaded():
    house = await House(limit=1000).open()
    source = ModelSource("request:1", config="{}", files=(("1/model.py", b"x" * 1000),))
    await leave(house, house.control.load(ModelId("m"), source), 5)
    record = house.control.registry.serving(ModelId("m"))
    assert (record.source.files, record.source.config) == ((), "{}")
    assert not record.can_load_again
    await house.close()
