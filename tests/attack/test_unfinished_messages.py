"""Callers of streams who announce large messages and never end them: memory keeps to its limit."""

import asyncio
from collections.abc import Iterator
from itertools import repeat

import pytest

from adapter.relay import frames
from adapter.relay.flow_control import STREAM_WINDOW
from tests.attack.test_control_calls import memory_kib
from tests.frontends.grpc import proxy_listener
from tests.frontends.grpc.proxy_listener import (
    MIB,
    STREAM,
    Wire,
    begin,
    frame,
    status,
    until,
    wire_to,
)
from tests.grpc_calls import calls_to
from tests.journeys.memory.models import metric
from tests.running import COMPLETE, RunningAdapter, embedded_adapter
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

_CALLERS = 8
_SENT = 30 * MIB  # of each message, which is announced as twice that
_LIMIT = 16 * MIB
_SOON = 60


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAdapter]:
    model = write_python_model(tmp_path_factory.mktemp("models") / "m")
    flags = (f"--model-roots={model.parent}", f"--max-inflight-body-bytes={_LIMIT}")
    with embedded_adapter(*flags, COMPLETE) as adapter:
        client = adapter.client()
        assert client.load("m", model).status == 200
        client.close()
        yield adapter


async def send_part(wire: Wire) -> None:
    """Send a part of a message, as fast as the window of its stream allows, until it is refused."""
    wire.greet()
    wire.send(begin(1, STREAM))
    room = STREAM_WINDOW
    first = b"\0" + (2 * _SENT).to_bytes(4, "big") + bytes(frames.FRAME_BYTES - 5)
    for piece in [first, *repeat(bytes(frames.FRAME_BYTES), _SENT // frames.FRAME_BYTES)]:
        room -= len(piece)
        while room < 0:
            kind, _, stream_id, payload = await wire.next() or (frames.GOAWAY, 0, 0, b"")
            if kind in {frames.HEADERS, frames.GOAWAY}:
                return
            if kind == frames.WINDOW_UPDATE and stream_id == 1:
                room += int.from_bytes(payload)
        wire.send(frame(frames.DATA, 0, 1, piece))


async def call_unfinished(address: str) -> str:
    """Send a part of a message; return the status that ends its stream."""
    async with wire_to(address) as wire:
        await send_part(wire)
        trailers = [got for got in wire.got if got[0] == frames.HEADERS]
        return status(trailers[0][3] if trailers else (await wire.answer(1))[1])


async def test_unfinished_messages_of_streams_keep_to_limit(
    adapter: RunningAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One caller is read beyond the limit, and one window of each other; without the limit this
    took 242 MiB. They end as too slow, or without room for 10 s; the last one may stay, as nobody
    waits for its room.
    """
    monkeypatch.setattr(proxy_listener, "SECONDS", _SOON)
    before = memory_kib(adapter, "VmHWM")
    calls = {asyncio.create_task(call_unfinished(adapter.grpc)) for _ in range(_CALLERS)}
    await until(lambda: sum(call.done() for call in calls) >= _CALLERS - 1, _SOON)
    rise = memory_kib(adapter, "VmHWM") - before
    assert rise < 110 * 1024
    ended = [call for call in calls if call.done()]
    assert {call.result() for call in ended} <= {"RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"}
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    with calls_to(adapter.grpc) as honest:
        assert honest.infer("m", 1.0)
    await until(lambda: metric(adapter, "triton_adapter_body_bytes") == 0)
