"""A completion that fails in mid-stream ends, is logged and counted as any inference that fails."""

import asyncio
import json
import logging

import pytest

from tests.fakes.http_triton import Script, Talk
from tests.frontends.http.listener import LONG, opened, request, until

PATH = "/v1/completions"
SECONDS = 30
CONFIG = json.dumps(
    {
        "input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}],
    }
).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ONE = b'data: {"text_output":"one "}\n\n'
FULL = b'data: {"error":"CUDA out of memory. Tried to allocate 2.00 GiB"}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def play(*events: bytes, closes: bool = False) -> Script:
    """Tell the config, and answer with the events of a stream."""

    async def script(talk: Talk) -> None:
        if talk.request_head.startswith(b"GET"):
            await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(CONFIG) + CONFIG)
            return
        await talk.say(HEAD)
        for event in events:
            await asyncio.sleep(0)
            await talk.say(chunk(event))
        if closes:
            talk.writer.close()
        else:
            await talk.say(b"0\r\n\r\n")

    return script


def call(*fields: str, stream: bool) -> bytes:
    body = {"model": "m", "prompt": "a", "stream": stream}
    return request(PATH, json.dumps(body).encode(), *fields)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (play(ONE, FULL), "OutOfMemory"),
        (play(ONE, b'data: {"error":"no \xe4"}\n\n'), "InferenceFailed"),
        (play(ONE, closes=True), "BackendUnavailable"),
    ],
    ids=["memory", "no UTF-8", "closed"],
)
async def test_failure_in_stream_is_told_and_logged(
    script: Script, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(script, LONG) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        answer = await caller.ask(call("X-Request-Id: 7", stream=True))
        first, last, rest = answer.body.decode().split("\n\n")
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "one "
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
        assert (answer.status, rest) == (200, "")
        [line] = [record for record in caplog.records if record.message == "request.failed"]
        fields = vars(line)
        assert (fields["error"], fields["status"], fields["model_id"]) == (code, 200, "m")
        assert (fields["path"], fields["request_id"]) == (PATH, "7")
        page = listener.fakes.metrics.page("")[0].decode()
        count = 'triton_adapter_oom_total{phase="infer"} '
        assert count + ("1.0" if code == "OutOfMemory" else "0.0") in page
        [record] = listener.fakes.control.registry.records()
        assert (record.usage.in_flight, len(record.usage.latencies)) == (0, 0)


async def test_late_piece_is_timeout_and_model_held() -> None:
    """Triton works on, and so an unload waits."""
    gate = asyncio.Event()

    async def script(talk: Talk) -> None:
        if talk.request_head.startswith(b"GET"):
            await play()(talk)
            return
        await talk.say(HEAD + chunk(ONE))
        await gate.wait()
        await talk.say(b"0\r\n\r\n")

    async with opened(script, LONG) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        await caller.send(call(stream=True))
        assert (await caller.head()).status == 200
        assert b"one " in await caller.chunk()
        [connection] = listener.server.parts.dataplane._pool.connections  # type: ignore[attr-defined]
        connection.seconds = 0.05
        connection._time_is_up()
        assert b"BackendTimeout" in await caller.chunk()
        assert await caller.chunk() == b""
        assert (listener.in_flight(), listener.abandoned()) == (1, 1)
        gate.set()
        await until(lambda: listener.in_flight() == 0)


@pytest.mark.parametrize(
    ("script", "refusal"),
    [
        (play(ONE, FULL), (507, "OutOfMemory")),
        (play(ONE, closes=True), (503, "BackendUnavailable")),
    ],
    ids=["event", "closed"],
)
async def test_whole_completion_that_fails_is_refused(
    script: Script, refusal: tuple[int, str]
) -> None:
    """Answer with a status: nothing of an answer was written yet."""
    async with opened(script, LONG) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        answer = await caller.ask(call(stream=False))
        assert (answer.status, answer.json()["error"]["code"]) == refusal


@pytest.mark.parametrize("stream", [True, False])
async def test_ids_of_call_reach_triton(*, stream: bool) -> None:
    trace = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with opened(play(ONE), LONG) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        assert (await caller.ask(call(trace, "X-Request-Id: 7", stream=stream))).status == 200
        lines = listener.upstream.requests[-1].head.split(b"\r\n")
        assert {trace.encode(), b"X-Request-Id: 7"} <= {*lines}


@pytest.mark.parametrize("stream", [True, False])
async def test_model_is_not_counted_as_time_of_adapter(*, stream: bool) -> None:
    """A completion is a stream of Triton's, and those are left out of the figures."""
    async with opened(play(ONE), LONG) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        assert (await caller.ask(call(stream=stream))).status == 200
        served = listener.served("openai", "completions")
        assert served.codes == {200: 1}
        assert served.own._counts[-1] == 0
