"""What a drain waits for, and what it tells callers over HTTP; on fakes."""

import asyncio

import pytest_asyncio
from aiohttp import ClientSession

from adapter.core.model import ModelId, ModelSource
from adapter.errors import BackendUnavailable
from adapter.frontends.drain import Drain
from adapter.frontends.http.answers import Answer, Writer, answer_json
from adapter.frontends.http.connection import Parts, Request
from adapter.frontends.http.contracts import ContainerContracts
from adapter.frontends.http.instrumentation import Clock, Instrumentation
from adapter.frontends.http.plans import Heads
from adapter.frontends.http.serve import Service
from adapter.frontends.http.server import HttpServer
from adapter.runtime.byte_budget import ByteBudget
from adapter.settings import parse_address
from tests.fakes.control import ControlOnFakes
from tests.frontends.http.listener import ANYWHERE


@pytest_asyncio.fixture
async def fakes():
    fakes = await ControlOnFakes().open()
    yield fakes
    await fakes.close()


def drain_of(fakes: ControlOnFakes, min_seconds: float = 0.0) -> Drain:
    return Drain(fakes.control, fakes.control_state, fakes.metrics.traffic, min_seconds)


class NoTriton:
    """For listeners that are asked for no inference."""


class Listener:
    """One that answers when it is told to; `/stream` has begun to answer before."""

    def __init__(self, fakes: ControlOnFakes) -> None:
        self.drain = drain_of(fakes)
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        parts = Parts(
            NoTriton(),
            Instrumentation(fakes.metrics),
            Clock(),
            ByteBudget(2**30),
            ANYWHERE,
            max_body_bytes=1000,
        )
        self._server = HttpServer(
            Service(parts, lambda _: self._handle),
            parts,
            Heads(
                fakes.metrics.traffic.served,
                ContainerContracts(fakes.control, fakes.control_state.triton),
                default_model=None,
                max_body_bytes=1000,
                sites=ANYWHERE,
            ),
            drain=self.drain,
        )

    async def _handle(self, request: Request) -> Answer | None:
        if request.raw_path == "/quick":
            return answer_json({})
        writer = Writer(request, {}, None) if request.raw_path == "/stream" else None
        self.reached.set()
        await self.go_on.wait()
        if writer is None:
            return answer_json({})
        writer.end()
        return None

    async def open(self) -> str:
        port = await self._server.open(parse_address("127.0.0.1:0"))
        return f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        await self._server.close(10)


@pytest_asyncio.fixture
async def listener(fakes):
    listener = Listener(fakes)
    listener.address = await listener.open()
    yield listener
    await listener.close()


async def test_a_drain_waits_for_requests(listener):
    async with ClientSession() as session:
        asked = asyncio.create_task(session.get(f"{listener.address}/slow"))
        await listener.reached.wait()
        listener.drain.begin()
        assert await listener.drain.finished(0.05) == 1
        finishing = asyncio.create_task(listener.drain.finished(30))
        listener.go_on.set()
        assert await finishing == 0
        assert (await asked).status == 200


async def test_a_drain_refuses_loads_and_waits_for_those_under_way(fakes):
    drain, gate = drain_of(fakes), fakes.calls.hold("load m")
    loading = asyncio.create_task(fakes.control.load(ModelId("m"), ModelSource("/m")))
    await gate.reached.wait()
    drain.begin()
    assert await drain.finished(0.05) == 1
    try:
        await fakes.control.load(ModelId("n"), ModelSource("/n"))
        raise AssertionError("it was taken")
    except BackendUnavailable:
        pass
    gate.open()
    assert await drain.finished(30) == 0
    await loading


async def test_callers_have_their_least_time_to_notice(fakes):
    drain = drain_of(fakes, min_seconds=0.2)
    drain.begin()
    begun = asyncio.get_running_loop().time()
    drain.begin()  # asking again does not begin again
    await drain.noticed()
    assert asyncio.get_running_loop().time() - begun > 0.19  # a clock of milliseconds
    assert await drain.finished(30) == 0


async def test_before_a_drain_connections_are_kept_and_in_it_they_are_not(listener):
    async with ClientSession() as session:
        async with session.get(f"{listener.address}/quick") as reply:
            assert "Connection" not in reply.headers
        listener.drain.begin()
        async with session.get(f"{listener.address}/quick") as reply:
            assert reply.headers["Connection"] == "close"


async def test_a_connection_whose_answer_had_begun_is_closed_behind_it(listener):
    reader, writer = await asyncio.open_connection(*listener.address[7:].split(":"))
    writer.write(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
    await listener.reached.wait()
    listener.drain.begin()
    listener.go_on.set()
    told = await asyncio.wait_for(reader.read(), 30)  # to its end
    assert b"close" not in told.partition(b"\r\n\r\n")[0].lower()
    writer.close()
