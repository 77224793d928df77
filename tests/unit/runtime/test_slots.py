"""Slots are given in turn: to each caller one, whatever others ask for."""

import asyncio
from collections.abc import Collection

import pytest

from adapter.runtime import slots
from adapter.runtime.slots import FairSlots


class Work:
    """Work that waits for slots; `order`: whose has had one."""

    def __init__(self, slots: FairSlots) -> None:
        self.slots = slots
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, callers: Collection[str], gate: asyncio.Event | None = None):
        async def work() -> None:
            async with self.slots.slot(name, callers):
                self.order.append(name)
                if gate is not None:
                    await gate.wait()

        self.tasks[name] = asyncio.create_task(work())
        await asyncio.sleep(0)

    async def done(self, *names: str) -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*(self.tasks[name] for name in names or self.tasks))


async def test_greedy_caller_has_every_second_turn():
    work, gate = Work(FairSlots(1)), asyncio.Event()
    await work.ask("a0", {"a"}, gate)
    for number in range(1, 5):
        await work.ask(f"a{number}", {"a"})
    for number in range(2):
        await work.ask(f"b{number}", {"b"})
    gate.set()
    await work.done()
    assert work.order == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]


async def test_shared_work_takes_its_earliest_turn():
    work, gate = Work(FairSlots(1)), asyncio.Event()
    both = {"a"}
    await work.ask("a0", {"a"}, gate)
    for number in range(1, 4):
        await work.ask(f"a{number}", {"a"})
    await work.ask("both", both)
    both.add("b")
    gate.set()
    await work.done()
    assert work.order == ["a0", "both", "a1", "a2", "a3"]


async def test_what_nobody_waits_for_any_more_comes_last():
    work, gate = Work(FairSlots(1)), asyncio.Event()
    await work.ask("a0", {"a"}, gate)
    await work.ask("left", set())
    await work.ask("a1", {"a"})
    gate.set()
    await work.done()
    assert work.order == ["a0", "a1", "left"]


async def test_slots_are_bounded_and_returned_on_cancel():
    work, gate = Work(FairSlots(2)), asyncio.Event()
    for name in "abcd":
        await work.ask(name, {""}, gate)
    assert work.order == ["a", "b"]
    for name in "ac":
        work.tasks[name].cancel()
    await asyncio.wait({work.tasks["a"], work.tasks["c"]})
    await asyncio.sleep(0)
    assert work.order == ["a", "b", "d"]
    gate.set()
    await work.done("b", "d")


async def test_work_that_hangs_holds_no_slot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slots, "_TICK_SECONDS", 0.01)
    hanging: set[str] = set()
    work, gate = Work(FairSlots(1, hanging.__contains__)), asyncio.Event()
    await work.ask("a", {""}, gate)
    await work.ask("b", {""})
    assert work.order == ["a"]
    hanging.add("a")
    await work.done("b")
    gate.set()
    await work.done()


async def test_work_cancelled_in_giving_turn_has_none():
    work, gate = Work(FairSlots(1)), asyncio.Event()
    await work.ask("a", {""}, gate)
    await work.ask("b", {""})
    await work.ask("c", {""})
    work.tasks["b"].cancel()
    work.tasks["a"].cancel()
    await asyncio.wait(work.tasks.values(), timeout=10)
    assert work.order == ["a", "c"]
