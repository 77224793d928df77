"""Opens the http listener in this process, before a Triton that says what a test wrote down."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from adapter.core.model import ModelId
from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.errors import InvalidRequest
from adapter.frontends.access import Access, Extensions, SitePolicy
from adapter.frontends.bodies import Limits
from adapter.frontends.drain import Drain
from adapter.frontends.http import answers
from adapter.frontends.http.answers import answer_json
from adapter.frontends.http.calls import Calls
from adapter.frontends.http.connection import Connection, Parts, Request
from adapter.frontends.http.contracts import ContainerContracts
from adapter.frontends.http.handled_inference import Inferences
from adapter.frontends.http.instrumentation import Clock, Instrumentation, path_segments
from adapter.frontends.http.plans import Heads
from adapter.frontends.http.serve import Handle, Service
from adapter.frontends.http.server import Connections, HttpServer
from adapter.frontends.http.v2 import V2
from adapter.frontends.openai.contract import OpenAI
from adapter.frontends.repository import Repository
from adapter.frontends.routes import INFERENCE, bare, find
from adapter.runtime.byte_budget import ByteBudget
from adapter.settings.values import parse_address
from adapter.telemetry.traffic import Served
from tests.fakes.control import ControlOnFakes
from tests.fakes.http_triton import Script, Upstream, served

MIB = 2**20
MAX_BODY = 64 * MIB

# A path whose requests are served by hand, and one that a handler answers in a task.
PLANNED, HANDLED = "/models/m/invoke", "/app"
PATHS = (PLANNED, HANDLED)

# None of these ends a connection in a test.
LONG = Limits(idle=60, head=60, body=60, answer=60, gone=60, linger=60)

both = pytest.mark.parametrize("path", PATHS)

# Takes requests by any name, as a listener that is not on loopback does.
ANYWHERE = SitePolicy(parse_address("0.0.0.0:0"), ())


def request(
    path: str, body: bytes = b"{}", *fields: str, method: str = "POST", version: str = "1.1"
) -> bytes:
    length = f"Content-Length: {len(body)}"
    return head(path, *fields, length, method=method, version=version) + body


def head(path: str, *fields: str, method: str = "POST", version: str = "1.1") -> bytes:
    return "\r\n".join(
        [f"{method} {path} HTTP/{version}", "Host: localhost", *fields, "\r\n"]
    ).encode()


async def turns(count: int) -> None:
    """Give everything so many turns of the loop, to see that something does not happen."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Bounded in turns of the loop, for what no event tells."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def refusal(self) -> tuple[int, str]:
        assert self.headers["content-type"] == "application/json"
        return self.status, self.json()["code"]


@dataclass
class Caller:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answer:
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        assert len(headers) == len(lines), "a header twice"
        return Answer(int(first.split()[1]), headers, b"")

    async def chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self) -> Answer:
        found = await self.head()
        if found.headers.get("transfer-encoding") == "chunked":
            while chunk := await self.chunk():
                found.body += chunk
        elif "content-length" in found.headers:
            found.body = await self.reader.readexactly(int(found.headers["content-length"]))
        else:
            found.body = await self.reader.read()
        return found

    async def ask(self, data: bytes) -> Answer:
        await self.send(data)
        return await self.answer()

    async def rest(self) -> bytes:
        """All that comes until the connection ends; b"" also when it is reset."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    def reset(self) -> None:
        own = self.writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + [0] * 7))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()


@dataclass
class Listener:
    address: str
    server: HttpServer
    fakes: ControlOnFakes
    upstream: Upstream
    drain: Drain
    contracts: ContainerContracts
    seen: list[Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    handled: list[str] = field(default_factory=list)  # targets of calls that were not planned
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    callers: list[Caller] = field(default_factory=list)
    raised: Exception = field(default_factory=lambda: RuntimeError("a bug"))
    serves_v2: bool = False  # every call of V2, not only inferences

    async def connect(self, **options: Any) -> Caller:
        if self.address.startswith("unix:"):
            opened = asyncio.open_unix_connection(self.address.removeprefix("unix:"))
        else:
            host, port = self.address.split(":")
            opened = asyncio.open_connection(host, int(port), **options)
        caller = Caller(*await opened)
        self.callers.append(caller)
        return caller

    async def handle(self, asked: Request) -> answers.Answer | None:
        """`/app/early` answers before it has read the body; `/app/late` waits for the gate before
        that, `/app/gate` behind it. What is for an endpoint raises what `raised` says.
        """
        path = asked.raw_path
        if asked.head.contract_name == "endpoint":
            raise self.raised
        if path == "/app/early":
            return answer_json({"early": True})
        if path == "/app/late":
            await self.gate.wait()
        body = await asked.read_body(MAX_BODY)
        self.seen.append(asked)
        self.bodies.append(body)
        if path == "/app/gate":
            self.reached.set()
            try:
                await self.gate.wait()
            finally:
                self.gone.set()
        if path == "/app/echo":
            return answers.Answer(body)
        return answer_json({})

    async def waiting(self, path: str) -> str:
        """Where a request of this kind stands still, at the gate; `reached` says that it does."""
        if path == HANDLED:
            return "/app/gate"

        async def script(talk: Any) -> None:
            self.reached.set()
            closed = asyncio.create_task(talk.reader.read(1))
            opened = asyncio.create_task(self.gate.wait())
            await asyncio.wait({closed, opened}, return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()
            self.gone.set()
            if not closed.done():
                closed.cancel()
                await asyncio.wait({closed})
                await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        self.upstream.script = script
        return PLANNED

    def in_hand(self, path: str) -> int:
        """Requests of this kind that stand still at the gate."""
        return self.in_flight() if path == PLANNED else len(self.bodies)

    def in_flight(self) -> int:
        return sum(record.usage.in_flight for record in self.fakes.control.registry.records())

    def abandoned(self) -> int:
        return self.fakes.control.leases.abandoned

    def served(self, frontend: str, method: str) -> Served:
        """Return the figures of one method, complete as for a scrape."""
        served = self.fakes.metrics.traffic.served(frontend, method)
        served.add_up()
        return served

    @property
    def connection(self) -> Connection:
        """The only connection that there is."""
        (connection,) = self.server._connections
        return connection

    @property
    def budget(self) -> ByteBudget:
        return self.server.parts.budget

    def whole_requests(self) -> list[bytes]:
        """The bodies of the requests that Triton has got wholly."""
        return [asked.body for asked in self.upstream.requests if asked.is_whole]

    async def until_begun(self) -> None:
        """The head of a request has come."""
        await until(lambda: any(not one.is_idle() for one in self.server._connections))

    async def hold(self, caller: Caller, path: str, behind: bytes = b"") -> None:
        """Have a request of this kind stand still at the gate; `behind` is sent with it."""
        await caller.send(request(await self.waiting(path)) + behind)
        await self.reached.wait()

    async def until_lost(self) -> None:
        """No connection of a caller is left."""
        await until(lambda: not self.server._connections)


def is_inference(path: str) -> bool:
    try:
        match = find(bare(path_segments(path)))
    except InvalidRequest:
        return False
    route = None if match is None else match.methods.get("POST")
    return route is not None and route.scope is INFERENCE and route.contract != "endpoint"


async def list_no_versions() -> dict[str, list[str]]:
    return {}


@asynccontextmanager
async def opened(
    script: Script | None = None,
    limits: Limits | None = None,
    where: str = "127.0.0.1:0",
    inflight_bytes: int = 2**30,
    sites: SitePolicy = ANYWHERE,
    *,
    connections: Connections | None = None,
    passthrough: tuple[str, ...] = (),
) -> AsyncIterator[Listener]:
    """Serve a listener, and check that no connection, task or lease is left of it."""
    before = asyncio.all_tasks()
    async with served(script) as (plane, upstream):
        fakes = await ControlOnFakes(limit=1024 * MIB).open()
        await fakes.load("m")
        budget = ByteBudget(inflight_bytes)
        drain = Drain(fakes.control, fakes.control_state, fakes.metrics.traffic, 0)
        contracts = ContainerContracts(
            fakes.control, fakes.control_state.triton, load_wait_seconds=0.01
        )
        heads = Heads(
            fakes.metrics.traffic.served,
            contracts,
            default_model=ModelId("m"),
            max_body_bytes=MAX_BODY,
            sites=sites,
        )
        heads.host = plane.host
        parts = Parts(
            plane,
            Instrumentation(fakes.metrics),
            Clock(),
            budget,
            sites,
            max_body_bytes=MAX_BODY,
        )
        inferences = Inferences(
            plane, contracts, max_body_bytes=MAX_BODY, default_model=ModelId("m")
        )

        def find_handler(asked: Request) -> Handle:
            return calls.find(asked) if asked.head.contract_name == "openai" else handle

        server = HttpServer(
            Service(parts, find_handler),
            parts,
            heads,
            drain=drain,
            limits=limits,
            check_interval_seconds=0.02,
            connections=connections,
            is_endpoint=connections is not None,
        )
        v2 = V2(
            fakes.control,
            fakes.control_state.triton,
            inferences,
            Repository(fakes.control, list_no_versions, []),
            extensions=Extensions(passthrough),
            max_body_bytes=MAX_BODY,
        )
        invoke = dict.fromkeys(("invoke", "invocations"), inferences.invoke)
        no_listing = cast("Any", None)  # no test asks for it
        openai = OpenAI(inferences, no_listing, Faults(Classifier(())))
        handlers = {"sagemaker": invoke, "v2": v2.handlers, "openai": openai.handlers}
        calls = Calls(Access("http"), handlers, passthrough)

        async def handle(asked: Request) -> answers.Answer | None:
            listener.handled.append(asked.raw_path)
            if listener.serves_v2 or (asked.method == "POST" and is_inference(asked.raw_path)):
                return await calls.find(asked)(asked)
            return await listener.handle(asked)

        listening = parse_address(where)
        port = await server.open(listening)
        address = f"{listening.host}:{port}" if listening.kind == "tcp" else str(listening)
        listener: Listener = Listener(address, server, fakes, upstream, drain, contracts)
        try:
            yield listener
        finally:
            for caller in listener.callers:
                caller.writer.close()
            await server.close(0.5)
            assert not server._connections
            assert listener.in_flight() == listener.abandoned()
            await plane.close()
            assert listener.in_flight() == 0
            assert (budget.held, budget.waiting, budget.buffered) == (0, 0, 0)
            await fakes.close()
    while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        await asyncio.wait(left, timeout=10)
        assert not {task for task in left if not task.done()}
