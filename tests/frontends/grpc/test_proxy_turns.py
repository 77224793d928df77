"""Connections take turns at the server for calls that do not go to Triton directly."""

import asyncio
from functools import partial

from tritonclient.grpc import service_pb2 as pb

from adapter.relay import frames
from adapter.relay.fallback_queue import MAX_NOT_BEGUN, FallbackQueue
from tests.frontends.grpc.proxy_listener import (
    STREAM,
    begin,
    complete,
    wire_to,
)

MANY = 300


class Session:
    def __init__(self, queue: FallbackQueue, sent: list[object]) -> None:
        self._queue, self._sent = queue, sent

    def wait(self, exchange: object) -> None:
        self._queue.wait(self, partial(self._send, exchange))

    def _send(self, exchange: object) -> None:
        self._queue.count_sent()
        self._sent.append(exchange)


async def test_calls_that_never_begin_keep_nobody_waiting():
    queue, sent = FallbackQueue(), []
    for _ in range(MAX_NOT_BEGUN):
        queue.count_sent()
    Session(queue, sent).wait("waits")
    await queue.forget_cancelled()
    assert sent == ["waits"]
    assert queue.has_room


async def test_slow_server_gets_no_more_calls():
    """Calls that wait for 30 s in gRPC's own queue were cancelled there: with turns of 0.15 s it
    had 978 calls, and begins with less than two in a second.
    """
    queue, sent = FallbackQueue(), []
    for _ in range(MAX_NOT_BEGUN):
        queue.count_sent()
    session = Session(queue, sent)
    for i in range(10):
        session.wait(i)

    async def begin_after_turns() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        queue.count_begun()

    beginning = asyncio.create_task(begin_after_turns())
    await queue.forget_cancelled()
    await beginning
    assert sent == [0]


def ends(found: tuple[int, int, int, bytes]) -> bool:
    return found[0] == frames.HEADERS and bool(found[1] & frames.END_STREAM)


async def test_stream_begins_before_hundreds_of_another_connection(proxy):
    names = []

    async def act(requests, _):
        async for message in requests:
            names.append(pb.ModelInferRequest.FromString(message).model_name)
            yield pb.ModelStreamInferResponse().SerializeToString()

    def opened(stream_id: int, model: str) -> bytes:
        head = begin(stream_id, STREAM)
        return head + complete(stream_id, model)

    proxy.answer_with(act)
    async with wire_to(proxy.address) as first, wire_to(proxy.address) as second:
        first.greet()
        second.greet()
        ids = range(1, 2 * MANY, 2)
        first.send(*(opened(i, "m") for i in ids))
        await first.answer(1)
        second.send(opened(1, "team/a"))
        await second.answer(1)
        assert len(names) < MANY
        open_ids = {*ids} - {
            each[2] for each in first.got if ends(each)
        }  # some end before the first
        while open_ids:
            if ends(found := await first.next()):
                open_ids.discard(found[2])
        assert names.count("m") == MANY
