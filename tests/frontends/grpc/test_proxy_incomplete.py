"""Requests whose message is not whole when the stream ends: the caller is told so at once."""

import gzip

import pytest

from adapter.relay import frames
from adapter.relay.frames import Code
from tests.cases import case
from tests.fakes.http2_triton import answer
from tests.frontends.grpc.proxy_listener import (
    INFER,
    STREAM,
    begin,
    data_frames,
    frame,
    head_of,
    limited,
    prefixed,
    request_of,
    status,
    wire_to,
)
from tests.grpc_calls import SERVICE

READY = f"/{SERVICE}/ModelReady"
LOAD = f"/{SERVICE}/RepositoryModelLoad"
LIVE = f"/{SERVICE}/ServerLive"
MESSAGE = prefixed(request_of("m"))
LARGE = prefixed(request_of("m", *[1.0] * 100_000))
PACKED = (b"grpc-encoding", b"gzip")


async def silent(requests, context):
    async for _ in requests:
        yield b""


async def answered(proxy, path, pieces, *more, end=True):
    """The block that ended the stream."""
    async with wire_to(proxy.address) as wire:
        wire.greet()
        head = frames.header_block(1, head_of(path, *more), end=not pieces)
        data = [
            frame(frames.DATA, frames.END_STREAM if end and i == len(pieces) - 1 else 0, 1, piece)
            for i, piece in enumerate(pieces)
        ]
        wire.send(head, *data)
        _, trailers = await wire.answer(1)
    return trailers


@pytest.mark.parametrize("path", [INFER, READY, LIVE, LOAD])
async def test_message_that_breaks_off_is_answered_at_once(proxy, path):
    for size in (0, 1, 3, 5, 6, 9, 10, 20, len(MESSAGE) - 1):
        with case(size):
            trailers = await answered(proxy, path, [MESSAGE[:size]])
            assert status(trailers) == "INTERNAL"
            assert b"before its message was complete" in trailers
            await proxy.until_at_rest()


@pytest.mark.parametrize("path", [INFER, READY])
async def test_call_without_message_is_answered_at_once(proxy, path):
    trailers = await answered(proxy, path, [])
    assert status(trailers) == "INTERNAL"
    assert b"the request ended after 0 bytes" in trailers


@pytest.mark.parametrize("name", ["m", "team/a"])
@pytest.mark.parametrize("last", [b"", b"x"])
async def test_broken_off_many_frame_message_is_answered(proxy, name, last):
    message = prefixed(request_of(name, *[1.0] * 100_000))[:-2]
    pieces = [message[at : at + 2**14] for at in range(0, len(message), 2**14)]
    trailers = await answered(proxy, INFER, [*pieces, last])
    assert status(trailers) == "INTERNAL"
    assert b"before its message was complete" in trailers
    await proxy.until_at_rest()


BADLY_PACKED = {
    "flag without an encoding": (b"\1" + MESSAGE[1:], ()),
    "not packed": (b"\1" + MESSAGE[1:], (PACKED,)),
    "unknown flag": (b"\2" + MESSAGE[1:], ()),
    "packed and cut": (b"\1" + prefixed(gzip.compress(MESSAGE[5:])[:-3])[1:], (PACKED,)),
}


@pytest.mark.parametrize("path", [INFER, READY])
async def test_a_message_that_cannot_be_unpacked_is_answered(proxy, path):
    for name, (message, more) in BADLY_PACKED.items():
        with case(name):
            assert status(await answered(proxy, path, [message], *more)) != "OK"


async def test_stream_without_messages_is_answered_as_before(proxy):
    proxy.answer_with(silent)
    assert status(await answered(proxy, STREAM, [b""])) == "OK"
    assert status(await answered(proxy, STREAM, [])) == "OK"


@pytest.mark.parametrize("size", [3, 20])
async def test_a_stream_whose_message_breaks_off_ends(proxy, size):
    proxy.answer_with(silent)
    await answered(proxy, STREAM, [MESSAGE[:size]])


@limited(timeout_seconds=0.5)
@pytest.mark.parametrize(("path", "size"), [(INFER, 1), (READY, 300_000)])
async def test_unfinished_message_is_given_up_in_time(proxy, path, size):
    pieces = [LARGE[at : at + 2**14] for at in range(0, size, 2**14)]
    pieces[-1] = pieces[-1][: size % 2**14]
    trailers = await answered(proxy, path, pieces, end=False)
    assert status(trailers) == "DEADLINE_EXCEEDED"
    assert b"BackendTimeout: the request did not come in time" in trailers


async def test_answer_before_whole_request_ends_its_stream(proxy, upstream, wire):
    """Triton gets RST_STREAM, as the request's stream would stay open there, and the client gets
    one, as the rest of its request is not needed.
    """
    wire.send(begin(1), *data_frames(1, LARGE[: 2**18], ends=False))
    triton = await upstream.asked()
    triton.send(answer(1))
    assert await triton.reset_of(1) == Code.NO_ERROR
    assert await wire.reset_of(1) == Code.NO_ERROR
    await proxy.until_free("m")
