"""What callers may do with HTTP/2 at the gRPC proxy, and what it answers to what they may not."""

import pytest
from hpack import Decoder, Encoder
from tritonclient.grpc import service_pb2 as pb

from adapter.relay import frames
from adapter.relay.flow_control import STREAM_WINDOW
from adapter.relay.frames import Code
from adapter.relay.headers import encoded
from tests.cases import case
from tests.frontends.grpc.proxy_listener import (
    INFER,
    begin,
    big_request,
    channel_to,
    data_frames,
    frame,
    head_of,
    limited,
    prefixed,
    request,
    request_of,
    wire_to,
)

MIB = 2**20
FIRST_OF_TABLE = b"\xbe"


@pytest.mark.parametrize("name", ["m", "team/a"])
async def test_one_byte_window_still_gets_all(proxy, wire, name):
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}))
    wire.send(request(1, name))
    data, ended = b"", False
    while not ended:
        kind, flags, stream_id, payload = await wire.next()
        if stream_id != 1:
            continue
        if kind == frames.DATA:
            assert len(payload) <= 1
            data += payload
            wire.send(frames.window_update(1, 1))
        ended = bool(flags & frames.END_STREAM and kind == frames.HEADERS)
    assert pb.ModelInferResponse.FromString(data[5:]).model_name == name


@pytest.mark.parametrize("name", ["m", "team/a"])
async def test_a_request_in_single_bytes_is_understood(proxy, wire, name):
    wire.send(begin(1))
    message = prefixed(request_of(name))
    for i in range(len(message)):
        end = frames.END_STREAM if i == len(message) - 1 else 0
        wire.send(frame(frames.DATA, end, 1, message[i : i + 1]))
    data, _ = await wire.answer(1)
    assert pb.ModelInferResponse.FromString(data[5:]).model_name == name


async def test_padding_priorities_and_continuations_are_understood(proxy, wire):
    block = head_of()
    payload = b"\3" + bytes(5) + block[:10] + b"\0" * 3
    flags = frames.PADDED | frames.HAS_PRIORITY
    wire.send(frame(frames.HEADERS, flags, 1, payload))
    wire.send(frame(frames.CONTINUATION, 0, 1, block[10:20]))
    wire.send(frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[20:]))
    wire.send(frame(frames.PRIORITY, 0, 1, bytes(5)), frame(0xFA, 3, 9, b"unknown"))
    data = b"\x05" + prefixed(request_of()) + bytes(5)
    wire.send(frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, data))
    answer, _ = await wire.answer(1)
    assert pb.ModelInferResponse.FromString(answer[5:]).model_name == "m"


ONE = begin(1)


HEAD = frame(frames.HEADERS, frames.END_HEADERS, 1, head_of())


BROKEN = [
    (frame(frames.DATA, 0, 0, b"x"), Code.PROTOCOL_ERROR),
    (frame(frames.DATA, 0, 1, b"x"), Code.PROTOCOL_ERROR),
    (frame(frames.HEADERS, frames.END_HEADERS, 2, head_of()), Code.PROTOCOL_ERROR),
    (frame(frames.HEADERS, frames.END_HEADERS, 0, head_of()), Code.PROTOCOL_ERROR),
    (frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff"), Code.COMPRESSION_ERROR),
    (frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x3f\xe1\x1f"), Code.COMPRESSION_ERROR),
    (frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xbe"), Code.COMPRESSION_ERROR),
    (frame(frames.HEADERS, frames.END_HEADERS, 1, head_of() + b"\x20"), Code.COMPRESSION_ERROR),
    (
        frame(frames.HEADERS, 0, 1, head_of()) + frame(frames.PING, 0, 0, bytes(8)),
        Code.PROTOCOL_ERROR,
    ),
    (frame(frames.CONTINUATION, 0, 1, b""), Code.PROTOCOL_ERROR),
    (frame(frames.PUSH_PROMISE, 0, 1, bytes(4)), Code.PROTOCOL_ERROR),
    (frame(frames.PING, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    (frame(frames.PING, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    (frame(frames.SETTINGS, 0, 0, bytes(5)), Code.FRAME_SIZE_ERROR),
    (frame(frames.SETTINGS, 1, 0, bytes(6)), Code.FRAME_SIZE_ERROR),
    (frame(frames.SETTINGS, 0, 1, b""), Code.PROTOCOL_ERROR),
    (frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}), Code.FLOW_CONTROL_ERROR),
    (frames.settings({frames.MAX_FRAME_SIZE: 1}), Code.PROTOCOL_ERROR),
    (frames.settings({frames.ENABLE_PUSH: 2}), Code.PROTOCOL_ERROR),
    (frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)), Code.PROTOCOL_ERROR),
    (frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), Code.FRAME_SIZE_ERROR),
    (frames.window_update(0, 2**31 - 1), Code.FLOW_CONTROL_ERROR),
    (frames.window_update(7, 1), Code.PROTOCOL_ERROR),
    (frames.reset(7, 0), Code.PROTOCOL_ERROR),
    (frame(frames.RST_STREAM, 0, 1, bytes(3)), Code.FRAME_SIZE_ERROR),
    (frame(frames.PRIORITY, 0, 0, bytes(5)), Code.PROTOCOL_ERROR),
    (frame(frames.GOAWAY, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    (frame(frames.GOAWAY, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    (frames.head(2**20 + 1, frames.DATA, 0, 1), Code.FRAME_SIZE_ERROR),
    (frames.head(2**16 + 1, frames.PING, 0, 0), Code.FRAME_SIZE_ERROR),
    (HEAD + frame(frames.DATA, frames.PADDED, 1, b"\x05abc"), Code.PROTOCOL_ERROR),
]


async def test_protocol_errors_end_connections_with_their_code(proxy):
    async with channel_to(proxy.address) as others:
        for number, (sent, code) in enumerate(BROKEN):
            with case(number, sent[:100]):
                async with wire_to(proxy.address) as wire:
                    wire.greet()
                    wire.send(sent)
                    assert await wire.ended_with() == code
                await others.unary_unary(INFER)(request_of())


@pytest.mark.parametrize(
    "more",
    [
        (b"Upper", b"x"),
        (b"connection", b"close"),
        (b":path", b"/twice"),
        (b"te", b"gzip"),
        (b"a b", b"x"),
        (b"x", b"a\r\nb: c"),
    ],
)
async def test_malformed_headers_end_their_stream_alone(proxy, wire, more):
    wire.send(begin(1, INFER, more))
    assert await wire.reset_of(1) == Code.PROTOCOL_ERROR
    wire.send(request(3))
    data, _ = await wire.answer(3)
    assert len(data) > 5


async def test_headers_behind_request_end_its_stream(wire, upstream):
    """RFC 9113 section 5.1: the stream is half-closed, and its answer has not come."""
    wire.send(request(1))
    triton = await upstream.accepted()
    await triton.until(frames.DATA, 1)
    wire.send(frames.header_block(1, head_of(), end=True))
    assert await wire.reset_of(1) == Code.STREAM_CLOSED


async def test_overrun_stream_window_ends_the_stream(proxy, upstream, wire):
    wire.send(ONE)
    message = prefixed(big_request("m", MIB))
    wire.send(frame(frames.DATA, 0, 1, message[:1000]))
    await upstream.accepted()
    wire.send(*data_frames(1, message[1000 : STREAM_WINDOW + 2**14], ends=False))
    assert await wire.reset_of(1) == Code.FLOW_CONTROL_ERROR
    await proxy.until_free("m")


@limited(max_inflight_bytes=1)
async def test_overrun_connection_window_ends_the_connection(proxy, upstream, wire):
    await wire.until(frames.SETTINGS)
    message = prefixed(big_request("m", MIB))
    wire.send(ONE, frame(frames.DATA, 0, 1, message[:1000]))
    await upstream.accepted()
    for stream_id in range(3, 35, 2):
        wire.send(begin(stream_id), *data_frames(stream_id, message[: 2**18], ends=False))
    assert await wire.ended_with() == Code.FLOW_CONTROL_ERROR
    await proxy.until_free("m")


HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", INFER),
    (":authority", "x"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


async def test_client_keeps_its_table_until_size_update(proxy):
    """grpc-okhttp acknowledges our SETTINGS and goes on using its table (RFC 7541 section 4.2)."""
    async with wire_to(proxy.address) as wire:
        encoder = Encoder()
        wire.greet()
        for stream_id in (1, 3, 5):
            await wire.ask(stream_id, encoder.encode([*HEADERS, ("x-own", str(stream_id))]))
        encoder.header_table_size = 0
        for stream_id in (7, 9):
            await wire.ask(stream_id, encoder.encode(HEADERS))
        assert proxy.counted("OK") == 5
        wire.send(frame(frames.HEADERS, frames.END_HEADERS, 11, FIRST_OF_TABLE))
        assert await wire.ended_with() == Code.COMPRESSION_ERROR


async def test_a_client_cannot_have_a_table_again(proxy):
    for before in (b"", b"\x20"):
        async with wire_to(proxy.address) as wire:
            wire.greet()
            await wire.ask(1, before + head_of()[1:])
            larger = b"\x3f\xe1\x1f" + head_of()[1:]
            wire.send(frame(frames.HEADERS, frames.END_HEADERS, 3, larger))
            assert await wire.ended_with() == Code.COMPRESSION_ERROR


async def test_tables_of_two_clients_are_apart(proxy):
    """The same block means one thing to each, and of those without a table it is cached."""
    adds = b"\x40" + encoded([(b"x-own", b"1")])[1:]
    for greeting in (b"\x20", b"", b"\x20", b""):
        async with wire_to(proxy.address) as wire:
            wire.greet()
            await wire.ask(1, greeting + head_of()[1:])
            await wire.ask(3, head_of()[1:] + adds)
            refers = frames.header_block(5, head_of()[1:] + FIRST_OF_TABLE, end=False)
            if greeting:
                wire.send(refers)
                assert await wire.ended_with() == Code.COMPRESSION_ERROR
            else:
                await wire.ask(5, head_of()[1:] + FIRST_OF_TABLE)


def test_headers_are_encoded_as_others_read_them():
    headers = [(b"a", b"b"), (b"x" * 127, b"y" * 300), (b"z", b"q" * 70_000)]
    assert Decoder(2**20).decode(encoded(headers), raw=True) == headers
