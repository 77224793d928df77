"""Connections take turns at the server for calls that do not go to Triton directly."""

from functools import partial

import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.http2 import frames
from adapter.http2.fallback_queue import MAX_NOT_BEGUN, FallbackQueue
from tests.frontends.grpc.proxy_listener import (
    STREAM,
    channel_to,
    frame,
    head_of,
    prefixed,
    proxy_before,
    request_of,
    wire_to,
)

MANY = 900


class Session:
    def __init__(self, queue: FallbackQueue, sent: list[object]) -> None:
        self._queue, self._sent = queue, sent

    def wait(self, exchange: object) -> None:
        self._queue.wait(self, partial(self._send, exchange))

    def _send(self, exchange: object) -> None:
        self._queue.sent()
        self._sent.append(exchange)


def test_a_connection_does_not_wait_for_all_that_another_one_has_sent():
    queue, sent = FallbackQueue(), []
    first, second = Session(queue, sent), Session(queue, sent)
    while queue.has_room:
        queue.sent()
    for i in range(10):
        first.wait(i)
    second.wait("another's")
    for _ in range(11):
        queue.begun()
    assert sent == [0, "another's", *range(1, 10)]


def test_calls_that_never_begin_keep_nobody_waiting():
    queue, sent = FallbackQueue(), []
    for _ in range(MAX_NOT_BEGUN):
        queue.sent()
    Session(queue, sent).wait("waits")
    queue.look()
    assert sent == ["waits"]
    assert queue.has_room


@pytest.mark.slow
async def test_a_stream_begins_before_hundreds_that_another_connection_has_opened_earlier():
    names = []

    async def act(requests, _):
        async for message in requests:
            names.append(pb.ModelInferRequest.FromString(message).model_name)
            yield pb.ModelStreamInferResponse().SerializeToString()

    async with (
        proxy_before(act) as proxy,
        wire_to(proxy.address) as wire,
        channel_to(proxy.address) as channel,
    ):
        wire.greet()
        message, ids = prefixed(request_of("m")), range(1, 2 * MANY, 2)
        for i in ids:
            wire.send(frames.header_block(i, head_of(STREAM), end=False))
            wire.send(frame(frames.DATA, frames.END_STREAM, i, message))
        await wire.answer(1)

        async def messages():
            yield request_of("team/a")

        assert len([one async for one in channel.stream_stream(STREAM)(messages())]) == 1
        assert len(names) < MANY
        open_ids = set(ids) - {1}
        while open_ids:
            kind, flags, stream_id, _ = await wire.next()
            if kind == frames.HEADERS and flags & frames.END_STREAM:
                open_ids.discard(stream_id)
        assert names.count("m") == MANY
