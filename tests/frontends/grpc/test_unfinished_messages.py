"""Messages that have not wholly come: the fallback server keeps what it has of them."""

import asyncio

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.frontends.bodies import HeldBody
from adapter.relay import frames
from adapter.relay.flow_control import STREAM_WINDOW
from adapter.relay.frames import Code
from adapter.runtime import byte_budget
from adapter.runtime.open_streams import STREAM_BYTES
from tests.frontends.grpc.proxy_listener import (
    MIB,
    STREAM,
    begin,
    big_request,
    channel_to,
    complete,
    data_frames,
    frame,
    limited,
    prefixed,
    request_of,
    status,
    until,
)
from tests.grpc_calls import SERVICE

LARGE = prefixed(big_request("m", MIB))
SMALL = prefixed(request_of("m"))
PART = 60_000  # bytes of a large message
KEPT = STREAM_BYTES + PART  # counts for one stream


async def each(requests, context):
    """Answer each request of a stream with the size of its tensor, as an id; and another call."""
    async for message in requests:
        asked = pb.ModelInferRequest.FromString(message)
        size = str(sum(map(len, asked.raw_input_contents)))
        answer = pb.ModelInferResponse(model_name=asked.model_name, id=size)
        yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()


@pytest.fixture(autouse=True)
def answering(proxy):
    proxy.answer_with(each)


def parts(stream_id: int = 1, message: bytes = LARGE) -> list[bytes]:
    """A part of a large message, in DATA frames."""
    return data_frames(stream_id, message[:PART], ends=False)


def unfinished(stream_id: int = 1) -> bytes:
    """The HEADERS of a stream, and a part of a large message."""
    return begin(stream_id, STREAM) + b"".join(parts(stream_id))


def sizes(data: bytes) -> list[str]:
    """The ids of the answers in DATA."""
    found = []
    while data:
        end = 5 + int.from_bytes(data[1:5])
        found.append(pb.ModelStreamInferResponse.FromString(data[5:end]).infer_response.id)
        data = data[end:]
    return found


def taken(proxy) -> HeldBody:
    """All room, taken by somebody who may go on alone and sends nothing."""
    other = HeldBody(proxy.budget, 2**30, is_reading=lambda: False)
    other._holding.take(proxy.budget.limit)
    return other


@limited(max_inflight_bytes=2 * MIB)
async def test_unfinished_messages_of_streams_count(proxy, wire):
    wire.send(unfinished(1), unfinished(3))
    await until(lambda: proxy.budget.held == 2 * KEPT)


@limited(max_inflight_bytes=2 * MIB)
@pytest.mark.parametrize("size", [100_000, MIB])
async def test_unfinished_messages_of_unary_calls_count(proxy, wire, size):
    """Those that no inference has are forwarded as they come; nothing bounds how many there are."""
    message = prefixed(big_request("m", size))
    for stream_id in (1, 3):
        wire.send(begin(stream_id, f"/{SERVICE}/ModelConfig"), *parts(stream_id, message))
    await until(lambda: proxy.budget.held == 2 * PART)
    wire.send(frame(frames.DATA, frames.END_STREAM, 1, message[PART:][:500_000]))
    await until(lambda: proxy.budget.held <= PART)
    wire.send(frames.reset(3, Code.CANCEL))
    await until(lambda: proxy.budget.held == 0)


@limited(max_inflight_bytes=2 * MIB)
async def test_message_counts_whatever_encoding_it_has(proxy, wire):
    wire.send(begin(1, STREAM), *parts(1, b"\1" + LARGE[1:]))
    await until(lambda: proxy.budget.held == KEPT)


@limited(max_inflight_bytes=2 * MIB)
async def test_unknown_method_counts_what_it_sends(proxy, wire):
    """It is no stream, but goes to the fallback server like one, until that server refuses it."""
    wire.send(begin(1, "/a.B/C"), *parts())
    assert status((await wire.answer(1))[1]) == "UNIMPLEMENTED"
    await until(lambda: proxy.budget.held == 0)


@limited(max_inflight_bytes=2 * MIB)
async def test_message_waits_for_room_and_goes_on(proxy, channel):
    """Its caller may send one window meanwhile."""
    other = taken(proxy)
    call = channel.stream_stream(STREAM)()
    writing = asyncio.ensure_future(call.write(big_request("m", 4 * MIB)))
    await until(lambda: proxy.budget.waiting == 1)
    assert not writing.done()
    assert proxy.budget.held <= proxy.budget.limit + STREAM_BYTES + STREAM_WINDOW
    other.end()
    await writing
    answer = pb.ModelStreamInferResponse.FromString(await call.read())
    assert answer.infer_response.id == str(4 * MIB)
    assert (proxy.budget.held, proxy.budget.waiting) == (STREAM_BYTES, 0)
    call.cancel()


@limited(max_inflight_bytes=2 * MIB)
@pytest.mark.parametrize("has_answer", [False, True])
async def test_message_without_room_ends_stream_in_time(proxy, wire, monkeypatch, has_answer):
    """The trailers of a stream that has begun to answer follow its headers; other calls go on."""
    monkeypatch.setattr(byte_budget, "_WAIT_SECONDS", 0.2)
    wire.send(begin(1, STREAM))
    if has_answer:
        wire.send(frame(frames.DATA, 0, 1, SMALL))
        await wire.data(1, 10)
    taken(proxy)
    wire.send(*parts())
    _, trailers = await wire.answer(1)
    assert status(trailers) == "RESOURCE_EXHAUSTED"
    assert b"there was no room for the body for 0.2 s" in trailers
    assert (b":status" in trailers or trailers[1:2] == b"\x88") is not has_answer
    assert await wire.reset_of(1) == Code.NO_ERROR
    await until(lambda: proxy.budget.held == proxy.budget.limit)
    wire.send(begin(3, STREAM), frame(frames.DATA, 0, 3, SMALL))
    assert sizes(await wire.data(3, 10)) == ["4"]


@limited(max_inflight_bytes=2 * MIB)
async def test_large_message_comes_whole_and_counts_no_more(proxy, channel):
    call = channel.stream_stream(STREAM)()
    for size in (MIB, 100_000, 4 * MIB, 4):
        await call.write(big_request("m", size))
        answer = pb.ModelStreamInferResponse.FromString(await call.read())
        assert answer.infer_response.id == str(size)
        assert proxy.budget.held == STREAM_BYTES
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await until(lambda: proxy.budget.held == 0)


ROW = SMALL + prefixed(big_request("m", 100_000)) + SMALL * 2 + prefixed(big_request("m", 200_000))
SIZES = ["4", "100000", "4", "4", "200000"]


@pytest.mark.parametrize(
    "cuts",
    [
        [],
        [2],
        [len(SMALL)],
        [len(SMALL) + 1, len(SMALL) + 3],
        [len(SMALL) + 4, len(SMALL) + 5, len(SMALL) + 6],
        [40_000, 90_000, len(ROW) - 200_000],
        [len(ROW) - 1],
    ],
)
async def test_messages_are_found_wherever_frames_end(proxy, wire, cuts):
    """The rest of the last message is missing until its bytes have counted."""
    wire.send(begin(1, STREAM))
    row = ROW + LARGE[:PART]
    for start, end in zip([0, *cuts], [*cuts, len(row)], strict=True):
        wire.send(frame(frames.DATA, 0, 1, row[start:end]))
        await wire.round_trip()
    await until(lambda: proxy.budget.held == KEPT)
    data = b"".join(piece for kind, _, _, piece in wire.got if kind == frames.DATA)
    while len(sizes(data)) < len(SIZES):
        data += (await wire.until(frames.DATA, 1))[2]
    assert sizes(data) == SIZES


@limited(max_inflight_bytes=2 * MIB)
@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("end", ["reset", "close", "end", "lost", "drain"])
async def test_ended_stream_gives_its_bytes_back(proxy, wire, end, has_room):
    other = None if has_room else taken(proxy)
    wire.send(unfinished())
    before = 0 if has_room else proxy.budget.limit
    await until(lambda: proxy.budget.held == before + KEPT)
    if end == "reset":
        wire.send(frames.reset(1, Code.CANCEL))
    elif end == "close":
        wire.writer.transport.abort()
    elif end == "end":
        wire.send(frame(frames.DATA, frames.END_STREAM, 1))
    elif end == "lost":
        proxy.session.upstreams[0].close()
    else:
        await proxy.server.close(0.1)
    await until(lambda: proxy.budget.held == before and not proxy.budget.waiting)
    if other is not None:
        other.end()


@limited(max_inflight_bytes=2 * MIB)
async def test_slow_message_gives_way_to_one_that_waits(proxy, wire, monkeypatch):
    """The oldest is read beyond the limit; if it sends nothing more, it ends, not the other."""
    monkeypatch.setattr(byte_budget, "_RATE_SECONDS", 0.2)
    async with channel_to(proxy.address) as channel:
        wire.send(unfinished())
        await until(lambda: proxy.budget.held == KEPT)
        call = channel.stream_stream(STREAM)()
        await call.write(big_request("m", 4 * MIB))
        _, trailers = await wire.answer(1)
        assert b"the body comes at 0.0 KiB/s, while others wait" in trailers
        assert pb.ModelStreamInferResponse.FromString(await call.read()).infer_response.id
        wire.send(begin(3, STREAM), complete(3, "m"))
        await wire.answer(3)
        call.cancel()
    await until(lambda: proxy.budget.held == 0)
