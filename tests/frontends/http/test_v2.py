"""What V2 passes on and what it keeps: in this process, before a Triton that is a few lines."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from io import BytesIO

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.frontends.access import Access, Extensions
from adapter.frontends.bodies import HeldBody
from adapter.frontends.drain import Drain
from adapter.frontends.http.calls import Calls
from adapter.frontends.http.connection import Parts
from adapter.frontends.http.contracts import ContainerContracts
from adapter.frontends.http.handled_inference import Inferences
from adapter.frontends.http.instrumentation import Clock, Instrumentation
from adapter.frontends.http.plans import Heads
from adapter.frontends.http.serve import Service
from adapter.frontends.http.server import HttpServer
from adapter.frontends.http.v2 import V2
from adapter.frontends.repository import Repository
from adapter.runtime import byte_budget
from adapter.runtime.byte_budget import ByteBudget
from adapter.settings.values import parse_address
from adapter.triton.http import HttpDataPlane
from tests.fakes.control import ControlOnFakes
from tests.fakes.unread import unread
from tests.frontends.http.listener import ANYWHERE

MIB = 2**20


@dataclass
class Upstream:
    """A Triton that answers every call with `answer` and remembers what it was asked."""

    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    seen: list[web.BaseRequest] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append(request)
        self.bodies.append(await request.content.read())
        return await self.answer(request)


async def fine(_: web.BaseRequest) -> web.StreamResponse:
    return web.json_response({"fine": True})


@dataclass
class Listener:
    upstream: Upstream
    fakes: ControlOnFakes
    caller: aiohttp.ClientSession
    dataplane: HttpDataPlane
    budget: ByteBudget


async def opened(stack: AsyncExitStack, server: web.Server) -> str:
    runner = web.ServerRunner(server)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"127.0.0.1:{runner.addresses[0][1]}"


async def no_versions() -> dict[str, list[str]]:
    return {}


async def listener(stack: AsyncExitStack, *passthrough: str) -> Listener:
    upstream = Upstream(fine)
    fakes = await ControlOnFakes(limit=MIB).open()
    stack.push_async_callback(fakes.close)
    dataplane = HttpDataPlane(Faults(Classifier(())), timeout_seconds=10, unread=unread())
    dataplane.connect(await opened(stack, web.Server(upstream.handle)))
    stack.push_async_callback(dataplane.close)
    budget = ByteBudget(MIB)
    contracts = ContainerContracts(
        fakes.control, fakes.control_state.triton, load_wait_seconds=0.01
    )
    inferences = Inferences(dataplane, contracts, max_body_bytes=2 * MIB, default_model=None)
    v2 = V2(
        fakes.control,
        fakes.control_state.triton,
        inferences,
        Repository(fakes.control, no_versions, []),
        extensions=Extensions(passthrough),
        max_body_bytes=2 * MIB,
    )
    calls = Calls(Access("http"), {"v2": v2.handlers}, passthrough)
    parts = Parts(
        dataplane,
        Instrumentation(fakes.metrics),
        Clock(),
        budget,
        ANYWHERE,
        max_body_bytes=2 * MIB,
    )
    heads = Heads(
        fakes.metrics.traffic.served,
        contracts,
        default_model=None,
        max_body_bytes=2 * MIB,
        sites=ANYWHERE,
    )
    heads.host = dataplane.host
    server = HttpServer(
        Service(parts, calls.find),
        parts,
        heads,
        drain=Drain(fakes.control, fakes.control_state, fakes.metrics.traffic, 0),
    )
    port = await server.open(parse_address("127.0.0.1:0"))
    stack.push_async_callback(server.close, 10)
    caller = aiohttp.ClientSession(f"http://127.0.0.1:{port}", auto_decompress=False)
    await stack.enter_async_context(caller)
    return Listener(upstream, fakes, caller, dataplane, budget)


@pytest_asyncio.fixture
async def closed() -> AsyncIterator[Listener]:
    async with AsyncExitStack() as stack:
        yield await listener(stack)


@pytest_asyncio.fixture
async def wide() -> AsyncIterator[Listener]:
    """Everything is passed through."""
    async with AsyncExitStack() as stack:
        yield await listener(stack, "shared_memory", "trace", "log")


_OPENED = [
    *(("GET", "/v2/trace/setting"), ("POST", "/v2/trace/setting")),
    *(("GET", "/v2/logging"), ("POST", "/v2/logging")),
    *(("GET", "/v2/systemsharedmemory/status"), ("GET", "/v2/cudasharedmemory/status")),
    *(("POST", f"/v2/{kind}sharedmemory/unregister") for kind in ("system", "cuda")),
    ("GET", "/v2/systemsharedmemory/region/a%2Fb%20c/status"),
    ("POST", "/v2/systemsharedmemory/region/a%2Fb%20c/register"),
    ("POST", "/v2/cudasharedmemory/region/r/unregister"),
]


@pytest.mark.parametrize(("method", "path"), _OPENED)
async def test_what_the_setting_opens_is_passed_on_as_it_is(wide, method, path):
    body = b'{"a": 1}' if method == "POST" else b""
    async with wide.caller.request(method, path, data=body) as reply:
        assert (reply.status, await reply.json()) == (200, {"fine": True})
    (asked,) = wide.upstream.seen
    assert (asked.method, asked.raw_path, wide.upstream.bodies) == (method, path, [body])


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_trace_settings_of_a_model_are_those_of_its_name_in_triton(wide, method):
    await wide.fakes.load("team/m")
    async with wide.caller.request(method, "/v2/models/team%2Fm/trace/setting") as reply:
        assert (reply.status, await reply.json()) == (200, {"fine": True})
    assert wide.upstream.seen[0].raw_path == "/v2/models/ta.u.team_2fm/trace/setting"


@pytest.mark.parametrize("path", ["", "/ready", "/config", "/stats", "/trace/setting"])
async def test_only_an_inference_is_use_of_a_model(wide, path):
    """Eviction goes by the last use, and a probe of a model is none."""
    record = await wide.fakes.load("m")
    async with wide.caller.get(f"/v2/models/m{path}") as reply:
        assert reply.status == 200
    assert len(wide.upstream.seen) == 1
    assert record.usage.served == 0
    async with wide.caller.post("/v2/models/m/infer", json={"inputs": []}) as reply:
        await reply.read()
    assert record.usage.served == 1


async def test_a_control_body_has_its_own_limit(wide):
    async with wide.caller.post("/v2/logging", data=BytesIO(b"x" * (MIB + 1))) as reply:
        assert reply.status == 413
    assert wide.upstream.seen == []


async def test_a_control_body_of_unknown_length_has_the_same_limit(wide):
    async def pieces():
        yield b"x" * MIB
        yield b"x"

    async with wide.caller.post("/v2/logging", data=pieces()) as reply:
        assert reply.status == 413
    assert wide.upstream.seen == []


async def test_headers_pass_except_those_of_connection(closed):
    async def answer(_: web.BaseRequest) -> web.Response:
        headers = {"endpoint-load-metrics": "x", "Connection": "X-Hop", "X-Hop": "1", "X-Own": "2"}
        return web.Response(body=b"{}", headers=headers)

    closed.upstream.answer = answer
    await closed.fakes.load("m")
    headers = {
        "endpoint-load-metrics-format": "json",
        "triton-request-kind": "odd",
        "traceparent": "00-1-2-01",
        "Authorization": "Bearer x",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
        "Content-Encoding": "GZIP",
    }
    body = gzip.compress(b"{}")
    async with closed.caller.post("/v2/models/m/infer", data=body, headers=headers) as reply:
        assert reply.status == 200
        assert (reply.headers["endpoint-load-metrics"], reply.headers["X-Own"]) == ("x", "2")
        assert "X-Hop" not in reply.headers
    (asked,) = closed.upstream.seen
    for name in ("endpoint-load-metrics-format", "triton-request-kind", "traceparent"):
        assert asked.headers[name] == headers[name]
    assert "Authorization" not in asked.headers
    assert asked.headers["Content-Encoding"] == "gzip"
    assert asked.headers["Content-Length"] == str(len(body))
    assert not {"X-Hop", "TE"} & asked.headers.keys()
    assert asked.headers.getall("Host") == [closed.dataplane.host]


async def test_a_large_body_is_passed_on_with_its_length(closed):
    body = bytes(2 * MIB)
    await closed.fakes.load("m")
    async with closed.caller.post("/v2/models/m/infer", data=BytesIO(body)) as reply:
        assert reply.status == 200
    assert closed.upstream.seen[0].headers["Content-Length"] == str(len(body))
    assert closed.upstream.bodies == [body]


@pytest.mark.parametrize("call", ["infer", "generate_stream"])
async def test_an_answer_that_breaks_off_in_triton_breaks_off_here(closed, call):
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        assert request.transport is not None
        request.transport.close()
        return response

    closed.upstream.answer = answer
    await closed.fakes.load("m")
    async with closed.caller.post(f"/v2/models/m/{call}", data=b"{}") as reply:
        assert reply.status == 200
        with pytest.raises(aiohttp.ClientError):
            await reply.read()
    assert closed.fakes.control.registry.records()[0].usage.in_flight == 0


async def test_a_large_error_text_of_many_pieces_is_read_whole(closed):
    text = "no such luck " * 100_000

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        raw = json.dumps({"error": text}).encode()
        for start in range(0, len(raw), 100_000):
            await response.write(raw[start : start + 100_000])
            await asyncio.sleep(0)
        return response

    closed.upstream.answer = answer
    await closed.fakes.load("m")
    async with closed.caller.post("/v2/models/m/infer", data=b"{}") as reply:
        assert (reply.status, (await reply.json())["error"]) == (500, text.strip())


async def test_names_of_others_are_left_alone_in_the_statistics_of_all(closed):
    async def answer(_: web.BaseRequest) -> web.Response:
        names = ("ta.u.a_2fb", "strange")
        return web.json_response({"model_stats": [{"name": name, "x": 1} for name in names]})

    closed.upstream.answer = answer
    await closed.fakes.load("a/b")
    async with closed.caller.get("/v2/models/stats") as reply:
        found = await reply.json()
    assert found["model_stats"] == [{"name": "a/b", "x": 1}, {"name": "strange", "x": 1}]


async def test_an_event_that_comes_in_two_pieces_is_renamed_too(closed):
    first, second = (b'data: {"x":%d,"model_name":"ta.u.a_2fb"}\n\n' % i for i in (1, 2))
    seen = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(first + second[:25])
        await seen.wait()
        await response.write(second[25:] + b"data: cut off")
        return response

    closed.upstream.answer = answer
    await closed.fakes.load("a/b")
    async with closed.caller.post("/v2/models/a%2Fb/generate_stream", data=b"{}") as reply:
        assert await reply.content.readline() == b'data: {"x":1,"model_name":"a/b"}\n'
        seen.set()
        assert await reply.content.read() == b'\ndata: {"x":2,"model_name":"a/b"}\n\ndata: cut off'


async def test_a_triton_that_is_not_ready_says_so_itself(closed):
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(status=400)

    closed.upstream.answer = answer
    for path in ("/v2/health/live", "/v2/health/ready"):
        async with closed.caller.get(path) as reply:
            assert (reply.status, await reply.read()) == (400, b"")


async def test_an_adapter_that_takes_nothing_is_live_and_not_ready(closed):
    closed.fakes.control.close()
    for path, status in (("/v2/health/live", 200), ("/v2/health/ready", 503)):
        async with closed.caller.get(path) as reply:
            assert reply.status == status


@pytest.mark.parametrize("path", ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats"])
async def test_without_triton_it_is_503(closed, path):
    await closed.dataplane.close()
    async with closed.caller.get(path) as reply:
        body = await reply.json()
    assert (reply.status, body["code"]) == (503, "BackendUnavailable")


_LOAD = "/v2/repository/models/m/load"
_LARGE = b"{}" + b" " * (MIB // 2)  # more than is there before its handler begins


async def test_the_body_of_a_load_waits_while_others_take_all_there_is(closed):
    with HeldBody(closed.budget, 2 * MIB) as other:
        await other.take(MIB)
        asking = asyncio.create_task(closed.caller.post(_LOAD, data=pieces(_LARGE)))
        async with asyncio.timeout(5):
            while not closed.budget.waiting:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
    async with await asking as reply:
        assert (reply.status, (await reply.json())["code"]) == (404, "SourceMissing")
    assert closed.budget.held == 0


async def test_a_load_that_finds_no_room_is_told_when_to_come_again(closed, monkeypatch):
    monkeypatch.setattr(byte_budget, "_WAIT_SECONDS", 0.2)
    with HeldBody(closed.budget, 2 * MIB, is_reading=lambda: False) as other:
        await other.take(MIB)
        async with closed.caller.post(_LOAD, data=pieces(_LARGE)) as reply:
            assert (reply.status, (await reply.json())["code"]) == (503, "TooManyWaiting")
            assert reply.headers["Retry-After"] == "1"
            assert reply.headers["X-Triton-Adapter-Not-Started"] == "1"


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    """A body whose length nobody announces."""
    yield body


@pytest.mark.parametrize("lengths", [("2", "3"), ("2", "2")])
async def test_an_inference_says_once_how_long_its_json_is(closed, lengths):
    await closed.fakes.load("m")
    headers = [("Inference-Header-Content-Length", length) for length in lengths]
    async with closed.caller.post("/v2/models/m/infer", data=b"{}", headers=headers) as reply:
        assert (reply.status, (await reply.json())["code"]) == (400, "InvalidRequest")
    assert closed.upstream.seen == []


class Events:
    """Triton's answer to generate_stream: one event, and an end when the test says so."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.breaks = False

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await self.end.wait()
        if self.breaks and request.transport is not None:
            request.transport.abort()
        return response


async def until_at_rest(listener: Listener) -> None:
    async with asyncio.timeout(10):
        while listener.budget.held:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


_GENERATE = "/v2/models/m/generate_stream"


async def test_event_stream_too_many_is_refused_with_figures(closed):
    """The other streams go on."""
    events = Events()
    closed.upstream.answer = events.answer
    await closed.fakes.load("m")
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(closed.caller.post(_GENERATE, data=b"{}"))
            for _ in range(2)
        ]
        async with closed.caller.post(_GENERATE, data=b"{}") as reply:
            refusal = await reply.json()
        assert (reply.status, refusal["code"]) == (503, "TooManyWaiting")
        assert refusal["error"].startswith("2 open streams hold 131072 of 131072 bytes (one 8th of")
        events.end.set()
        for one in opened:
            assert await one.read() == b"data: {}\n\n"
    await until_at_rest(closed)


@pytest.mark.parametrize("end", ["caller", "triton"])
async def test_a_stream_of_events_that_breaks_counts_no_more(closed, end):
    events = Events()
    closed.upstream.answer = events.answer
    await closed.fakes.load("m")
    reply = await closed.caller.post(_GENERATE, data=b"{}")
    assert closed.budget.held == 2**16
    if end == "caller":
        reply.close()
        await until_at_rest(closed)
        events.end.set()
    else:
        events.breaks = True
        events.end.set()
        await until_at_rest(closed)
        reply.close()


async def test_a_stream_that_triton_refuses_counts_no_more(closed):
    await closed.fakes.load("m")
    for body in (b"{", b"{}"):
        async with closed.caller.post(_GENERATE, data=body) as reply:
            await reply.read()
    await closed.dataplane.close()
    async with closed.caller.post(_GENERATE, data=b"{}") as reply:
        assert reply.status == 503
    await until_at_rest(closed)
