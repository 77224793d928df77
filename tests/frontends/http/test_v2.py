"""What V2 passes on and what it keeps, before a Triton that is a few lines."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import pytest

from adapter.core.model import ModelId
from adapter.runtime import clock
from tests.cases import case
from tests.fakes.http_triton import Talk, says
from tests.frontends.http.listener import (
    LONG,
    MIB,
    Caller,
    Listener,
    head,
    opened,
    request,
    until,
)

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = "Transfer-Encoding: chunked"
INFER = "/v2/models/m/infer"
GENERATE = "/v2/models/m/generate_stream"
EVENT = b"data: {}\n\n"
# A field that comes twice: an inference whose head has it is answered in a task.
HANDLED_FIELDS = ("X-A: 1", "X-A: 2")


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    """Everything is passed through."""
    everything = ("shared_memory", "trace", "log")
    async with opened(limits=LONG, inflight_bytes=MIB, passthrough=everything) as listener:
        listener.serves_v2 = True
        yield listener


def get(path: str) -> bytes:
    return head(path, method="GET")


def with_length(answer: bytes, *fields: bytes, line: bytes = OK) -> bytes:
    return line + b"\r\n".join([b"Content-Length: %d" % len(answer), *fields, b"", answer])


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


OPENED = [
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/trace/setting"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/cudasharedmemory/status"),
    *(("POST", f"/v2/{kind}sharedmemory/unregister") for kind in ("system", "cuda")),
    ("GET", "/v2/systemsharedmemory/region/a%2Fb%20c/status"),
    ("POST", "/v2/systemsharedmemory/region/a%2Fb%20c/register"),
    ("POST", "/v2/cudasharedmemory/region/r/unregister"),
]


async def test_opened_routes_are_passed_on_unchanged(listener, caller):
    for method, path in OPENED:
        with case(method, path):
            body = b'{"a": 1}' if method == "POST" else b""
            found = await caller.ask(request(path, body, method=method))
            assert (found.status, found.body) == (200, b"{}")
            asked = listener.upstream.requests.pop()
            assert asked.head.startswith(f"{method} {path} HTTP/1.1\r\n".encode())
            assert asked.body == body


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_trace_settings_follow_tritons_model_name(listener, caller, method):
    await listener.fakes.load("team/m")
    asked = request("/v2/models/team%2Fm/trace/setting", b"", method=method)
    assert (await caller.ask(asked)).status == 200
    (passed_on,) = listener.upstream.requests
    assert b" /v2/models/ta.u.team_2fm/trace/setting HTTP/1.1\r\n" in passed_on.head


async def test_only_an_inference_is_use_of_a_model(listener, caller):
    """Eviction goes by the last use, and a probe of a model is none."""
    usage = listener.fakes.control.registry.serving(ModelId("m")).usage
    for path in ("", "/ready", "/config", "/stats", "/trace/setting"):
        assert (await caller.ask(get(f"/v2/models/m{path}"))).status == 200
    assert len(listener.upstream.requests) == 5
    assert usage.served == 0
    await caller.ask(request(INFER))
    assert usage.served == 1


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_control_body_has_its_own_limit(listener, caller, is_chunked):
    body = b"x" * (MIB + 1)
    raw = head("/v2/logging", CHUNKED) + chunk(body) if is_chunked else request("/v2/logging", body)
    await caller.send(raw)
    assert (await caller.answer()).status == 413
    assert listener.upstream.requests == []


async def test_headers_pass_except_those_of_connection(listener, caller):
    fields = (b"endpoint-load-metrics: x", b"Connection: X-Hop", b"X-Hop: 1", b"X-Own: 2")
    listener.upstream.script = says(with_length(b"{}", *fields))
    passed_on = ("endpoint-load-metrics-format: json", "triton-request-kind: odd")
    kept = ("Authorization: Bearer x", "Connection: keep-alive, X-Hop", "X-Hop: 1", "TE: trailers")
    body = gzip.compress(b"{}")
    found = await caller.ask(request(INFER, body, *passed_on, *kept, "Content-Encoding: GZIP"))
    assert (found.headers["endpoint-load-metrics"], found.headers["x-own"]) == ("x", "2")
    assert "x-hop" not in found.headers
    (asked,) = listener.upstream.requests
    _, *lines = asked.head.decode().lower().split("\r\n")
    assert set(lines) >= {*passed_on, "content-encoding: gzip", f"content-length: {len(body)}"}
    assert not {line.split(":")[0] for line in lines} & {"authorization", "x-hop", "te"}


async def test_stream_broken_by_triton_breaks_here(listener, caller):
    answer = OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(EVENT)
    listener.upstream.script = says(answer, closes=True)
    await caller.send(request(GENERATE))
    assert (await caller.head()).status == 200
    assert not (await caller.rest()).endswith(b"0\r\n\r\n")
    await until(lambda: listener.in_flight() == 0)


@pytest.mark.parametrize(
    ("path", "frame"),
    [(GENERATE, CHUNKED), (INFER, f"Content-Length: {2 * MIB}")],
    ids=["events", "large"],
)
async def test_model_is_at_work_when_its_answer_breaks(listener, caller, path, frame):
    """A model whose answers begin before they end Triton would never be given up."""
    answer = OK + frame.encode() + b"\r\n\r\n" + chunk(EVENT)
    listener.upstream.script = says(answer, closes=True)
    await caller.send(request(path, b"{}", *HANDLED_FIELDS))
    assert (await caller.head()).status == 200
    await caller.rest()
    await until(lambda: listener.in_flight() == 0)
    assert [*listener.fakes.control.leases.at_work.collect(clock.monotonic())] == ["m"]


async def test_large_error_in_pieces_is_read_whole(listener, caller):
    text = "no such luck " * 100_000
    raw = with_length(json.dumps({"error": text}).encode(), line=b"HTTP/1.1 500 No\r\n")
    pieces = [raw[at : at + 100_000] for at in range(0, len(raw), 100_000)]
    listener.upstream.script = says(*pieces)
    found = await caller.ask(request(INFER))
    assert (found.status, found.json()["error"]) == (500, text.strip())


async def test_statistics_keep_other_models_names(listener, caller):
    names = ("ta.u.a_2fb", "strange")
    statistics = {"model_stats": [{"name": name, "x": 1} for name in names]}
    listener.upstream.script = says(with_length(json.dumps(statistics).encode()))
    await listener.fakes.load("a/b")
    found = (await caller.ask(get("/v2/models/stats"))).json()
    assert found["model_stats"] == [{"name": "a/b", "x": 1}, {"name": "strange", "x": 1}]


async def test_event_in_two_pieces_is_renamed(listener, caller):
    first, second = (b'data: {"x":%d,"model_name":"ta.u.a_2fb"}\n\n' % i for i in (1, 2))

    async def script(talk: Talk) -> None:
        await talk.say(OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(first + second[:25]))
        await listener.gate.wait()
        await talk.say(chunk(second[25:] + b"data: cut off") + b"0\r\n\r\n")

    listener.upstream.script = script
    await listener.fakes.load("a/b")
    await caller.send(request("/v2/models/a%2Fb/generate_stream"))
    await caller.head()
    begun = await caller.chunk()
    assert begun.startswith(b'data: {"x":1,"model_name":"a/b"}\n\n')
    listener.gate.set()
    while more := await caller.chunk():
        begun += more
    assert begun.endswith(b'\ndata: {"x":2,"model_name":"a/b"}\n\ndata: cut off')


async def test_name_behind_long_outputs_is_renamed(listener, caller):
    """The answer of generate begins with the outputs."""
    text = b'{"OUT":"%b","model_name":"%b"}'

    async def script(talk: Talk) -> None:
        body = text % (bytes(2 * MIB), b"ta.u.a_2fb")
        await talk.say(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    listener.upstream.script = script
    await listener.fakes.load("a/b")
    found = await caller.ask(request("/v2/models/a%2Fb/generate"))
    assert found.body == text % (bytes(2 * MIB), b"a/b")


async def test_http_1_0_learns_end_of_events_by_close(listener, caller):
    """Nothing else ends a body of unknown length, so the connection is not kept."""

    async def script(talk: Talk) -> None:
        await talk.say(OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(EVENT) + b"0\r\n\r\n")

    listener.upstream.script = script
    await caller.send(request(GENERATE, b"{}", "Connection: keep-alive", version="1.0"))
    async with asyncio.timeout(20):  # an idle connection lasts for longer
        assert (await caller.rest()).endswith(b"\r\n\r\n" + EVENT)


async def test_broken_event_stream_shows_its_model_at_work(listener, caller):
    """A connection breaks before the process has ended: the exit is judged by what broke off."""

    async def script(talk: Talk) -> None:
        await talk.say(OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(EVENT))
        await listener.gate.wait()
        talk.writer.transport.abort()

    listener.upstream.script = script
    usage = listener.fakes.control.registry.serving(ModelId("m")).usage
    await caller.send(request(GENERATE))
    await caller.head()
    assert await caller.chunk() == EVENT
    assert usage.in_flight == 1
    listener.gate.set()
    await until(lambda: usage.in_flight == 0)
    at_work = listener.fakes.parts.leases.at_work
    assert at_work.collect(clock.monotonic()).keys() == {"m"}


async def test_unready_triton_says_so_itself(listener, caller):
    listener.upstream.script = says(with_length(b"", line=b"HTTP/1.1 400 No\r\n"))
    for path in ("/v2/health/live", "/v2/health/ready"):
        found = await caller.ask(get(path))
        assert (found.status, found.body) == (400, b"")


async def test_closed_adapter_is_live_but_not_ready(listener, caller):
    listener.fakes.control.close()
    for path, status in (("/v2/health/live", 200), ("/v2/health/ready", 503)):
        assert (await caller.ask(get(path))).status == status


async def test_without_triton_it_is_503(listener, caller):
    await listener.server.parts.dataplane.close()
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats"):
        assert (await caller.ask(get(path))).refusal == (503, "BackendUnavailable")


@pytest.mark.parametrize("lengths", [("2", "3"), ("2", "2")])
async def test_inference_states_its_json_length_once(listener, caller, lengths):
    fields = [f"Inference-Header-Content-Length: {length}" for length in lengths]
    assert (await caller.ask(request(INFER, b"{}", *fields))).refusal == (400, "InvalidRequest")
    assert listener.upstream.requests == []


# -- streams of events, each of which counts in the byte budget ------------------------------------


@pytest.fixture
def breaks(listener: Listener) -> asyncio.Event:
    """Set by a test whose stream of events breaks off behind its first event."""
    breaks = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.say(OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(EVENT))
        await listener.gate.wait()
        if breaks.is_set():
            talk.writer.transport.abort()
        else:
            await talk.say(b"0\r\n\r\n")

    listener.upstream.script = script
    return breaks


async def begin_stream(listener: Listener) -> Caller:
    caller = await listener.connect()
    await caller.send(request(GENERATE))
    await caller.head()
    assert await caller.chunk() == EVENT
    return caller


async def until_at_rest(listener: Listener) -> None:
    await until(lambda: not listener.budget.held)


@pytest.mark.usefixtures("breaks")
async def test_event_stream_too_many_is_refused_with_figures(listener, caller):
    """The other streams go on."""
    streams = [await begin_stream(listener) for _ in range(2)]
    found = await caller.ask(request(GENERATE))
    assert found.refusal == (503, "TooManyWaiting")
    assert found.json()["error"].startswith(
        "2 open streams hold 131072 of 131072 bytes (one 8th of"
    )
    listener.gate.set()
    for other in streams:
        assert await other.chunk() == b""
    await until_at_rest(listener)


@pytest.mark.parametrize("end", ["caller", "triton"])
async def test_broken_event_stream_counts_no_more(listener, breaks, end):
    caller = await begin_stream(listener)
    assert listener.budget.held == 2**16
    if end == "caller":
        caller.reset()
    else:
        breaks.set()
        listener.gate.set()
    await until_at_rest(listener)
    listener.gate.set()


async def test_a_stream_that_triton_refuses_counts_no_more(listener, caller):
    listener.upstream.script = says(with_length(b'{"error":"x"}', line=b"HTTP/1.1 400 No\r\n"))
    for body in (b"{", b"{}"):
        assert (await caller.ask(request(GENERATE, body))).status == 400
    await listener.server.parts.dataplane.close()
    assert (await caller.ask(request(GENERATE))).status == 503
    await until_at_rest(listener)
