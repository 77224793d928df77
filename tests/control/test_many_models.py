"""Thousands of models: what is told of all of them is told in pieces, and nothing gets lost."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import grpc
import pytest
from tritonclient.grpc import service_pb2

from adapter.backend.triton import TritonControl
from adapter.core.account import Account, Stage
from adapter.core.faults import Faults
from adapter.core.ledger import Ledger
from adapter.core.memory import HOST, NO_BYTES, DeviceReading, MemoryReading
from adapter.core.model import ModelId, ModelSource, Placement, TritonName
from adapter.core.oom import Classifier
from adapter.core.registry import ModelRecord
from adapter.core.sizing import Basis, Estimate
from tests.control.admin import admin_of, adopt
from tests.fakes.house import House


@pytest.mark.parametrize(("seconds_ago", "looks"), [(-60, []), (3, ["read"])])
async def test_a_scrape_looks_at_memory_unless_that_was_done_just_now(seconds_ago, looks):
    house = await House(limit=1000).open()
    at, seen = house.control.memory.readings.samples.pop()
    house.control.memory.readings.samples.append((at - seconds_ago, seen))

    async with admin_of(house) as client:
        assert (await client.get("/metrics")).status == 200

    assert house.steps.seen == looks


@pytest.mark.parametrize("count", [0, 1, 20, 21, 45])
async def test_the_state_has_every_model(count):
    house = await House(limit=1000).open()
    names = adopt(house, count)

    async with admin_of(house) as client:
        state = await (await client.get("/debug/state")).json()

    assert [model["model_id"] for model in state["models"]] == names
    assert (state["version"], state["memory"]["devices"].keys()) == ("1", {HOST})


async def test_others_have_their_turn_while_the_state_is_told():
    house = await House().open()
    adopt(house, 200)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with admin_of(house) as client:
        await client.get("/metrics")
        other = house.begin(others())
        answer = await client.get("/debug/state")
        first = turns
        await answer.read()
        other.cancel()

    assert turns > first
    assert turns >= 200 // 20
    await house.close()


class _Index(grpc.GenericRpcHandler):
    def __init__(self, answer: service_pb2.RepositoryIndexResponse) -> None:
        self._answer = answer
        self.calls = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def tell(_request: bytes, _context: object) -> bytes:
            self.calls += 1
            return self._answer.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(tell)


@asynccontextmanager
async def before(handler: _Index) -> AsyncIterator[TritonControl]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    triton = TritonControl(Faults(Classifier(())), load_timeout_seconds=10, call_timeout_seconds=10)
    triton.connect(f"127.0.0.1:{port}")
    try:
        yield triton
    finally:
        await triton.close()
        await server.stop(None)


async def test_unloads_that_wait_at_the_same_time_share_one_answer_of_triton():
    index = service_pb2.RepositoryIndexResponse()
    index.models.add(name="m0", version="1", state="UNLOADING")
    handler = _Index(index)

    async with before(handler) as triton:
        left = await asyncio.gather(*(triton.wait_gone({f"m{n}"}, 0) for n in range(20)))

    assert left == [{"m0"}, *[set[str]()] * 19]
    assert handler.calls == 1


async def test_a_long_index_is_read_to_its_end():
    index = service_pb2.RepositoryIndexResponse()
    states = ("READY", "UNLOADING", "LOADING", "UNAVAILABLE", "", "READY")
    for number in range(1201):
        index.models.add(name=f"m{number}", version="1", state=states[number % 6])
    index.models.add(name="m3", version="2", state="READY")

    async with before(_Index(index)) as triton:
        ready, present = await triton.ready(), await triton.present()

    assert ready == {f"m{n}" for n in range(1201) if n % 6 in {0, 5}} | {"m3"}
    assert present == ready | {f"m{n}" for n in range(1201) if n % 6 in {1, 2}}


def test_the_books_of_many_models_add_up_as_they_come_change_and_go():
    ledger = Ledger(None, lambda _: 0)
    ledger.open(MemoryReading({HOST: DeviceReading(10**9, 0)}, source=HOST))
    for number in range(100):
        ledger.reserve(ModelId(f"m{number}"), {HOST: number})
    for number in range(0, 100, 2):
        ledger.settle(ModelId(f"m{number}"), {HOST: 3})
    for number in range(0, 100, 4):
        ledger.hold(ModelId(f"m{number}"), {HOST: 5})
    for number in range(50):
        ledger.release(ModelId(f"m{number}"))

    book, models = ledger.snapshot().devices[HOST], ledger.snapshot().models

    held = range(50, 100, 2)
    assert models == 50
    assert book.reserved_bytes == sum(range(51, 100, 2))
    assert book.held_bytes == sum(5 if n % 4 == 0 else 3 for n in held)


async def test_a_load_and_an_unload_look_at_no_other_model():
    async def steps(known: int) -> int:
        house = await House(limit=10**6).open()
        house.memory.tells_apart = True
        for number in range(known):
            name = ModelId(f"m{number}")
            record = house.control.registry.adopt(name, TritonName(name), ModelSource(f"/{name}"))
            house.control.registry.place(record, Placement((record.name,)))
            house.control.memory.accounts.add(_apart(record))
        await _come_and_go(house)  # what is made once
        with _counted_calls() as calls:
            await _come_and_go(house)
        await house.close()
        return len(calls)

    few, many = await steps(10), await steps(1000)

    assert abs(many - few) < 10  # a sorted list is searched


def _apart(record: ModelRecord) -> Account:
    learned = Estimate(NO_BYTES, Basis.LEARNED)
    return Account(record, "key", learned, stage=Stage.SETTLED, is_apart=True)


async def _come_and_go(house: House) -> None:
    await house.load("new")
    await house.unload("new")


@contextmanager
def _counted_calls() -> Iterator[list[str]]:
    """The functions that this thread calls, generators each time that they go on."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _given: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    earlier = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(earlier)
