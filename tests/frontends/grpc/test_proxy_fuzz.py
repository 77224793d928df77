"""Whatever a client or Triton sends over HTTP/2: no crash, no hang, nothing left behind."""

import asyncio
import contextlib
import logging

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter.errors import InvalidRequest
from adapter.frontends.grpc.messages import read_field
from adapter.relay import frames
from adapter.relay.frames import Code, ConnectionFault
from adapter.relay.headers import HeaderBlockCache, HeaderReader, HeadersTooLarge, encoded
from adapter.relay.protobuf import Malformed, NameScanner, first_name, plain_name
from tests.frontends.grpc.proxy_listener import (
    INFER,
    MAX_MESSAGE,
    SERVICE,
    STREAM,
    channel_to,
    echo,
    frame,
    head_of,
    prefixed,
    proxy_before,
    request,
    request_of,
    wire_to,
)

EXAMPLES = 10  # of each; for minutes: tests/nightly/test_properties.py
MAY_BE_ASKED = {"ModelInfer", "ModelStreamInfer"}

EVIL = f"/{SERVICE}/RepositoryModelUnload"
HEADS = [head_of(), head_of()[1:], head_of(STREAM), head_of("/x/y"), head_of(EVIL), b"", b"\xbe"]
BLOCKS = st.sampled_from(HEADS) | st.binary(max_size=20)
MESSAGES = st.sampled_from([prefixed(request_of()), prefixed(request_of("team/a"))])
PAYLOADS = st.binary(max_size=12) | st.builds(bytes, st.sampled_from([4, 5, 8, 300])) | MESSAGES
FRAMES = (
    st.builds(
        frame,
        st.integers(0, 11),
        st.sampled_from([0, 1, 4, 5, 8, 0x0D, 0x20, 0x25, 0xFF]),
        st.sampled_from([0, 1, 1, 3, 5, 7, 2, 2**31 - 1]),
        PAYLOADS | BLOCKS,
    )
    | st.builds(
        lambda i, block, end: frames.header_block(2 * i + 1, block, end=end),
        st.integers(0, 5),
        BLOCKS,
        st.booleans(),
    )
    | st.builds(
        lambda i, message, end: frame(frames.DATA, end, 2 * i + 1, message),
        st.integers(0, 5),
        MESSAGES | st.binary(max_size=30),
        st.integers(0, 1),
    )
    | st.builds(frames.window_update, st.integers(0, 9), st.integers(1, 2**31 - 1))
    | st.builds(frames.reset, st.integers(0, 9), st.integers(0, 20))
    | st.builds(
        lambda key, value: frames.settings({key: value}),
        st.integers(0, 8),
        st.sampled_from([0, 1, 2**14, 2**16, 2**31 - 1, 2**32 - 1]),
    )
    | st.binary(max_size=10)
)
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.slow
@SETTINGS
@given(st.lists(st.lists(FRAMES, max_size=25), min_size=40, max_size=40))
def test_a_client_that_sends_anything(sessions):
    async def play():
        async with proxy_before(echo, timeout_seconds=3) as proxy:

            async def one(session):
                async with wire_to(proxy.address) as wire:
                    wire.greet()
                    # uvloop raises RuntimeError where the connection has been closed already
                    with contextlib.suppress(OSError, RuntimeError):
                        for sent in session:
                            wire.send(sent)
                            await asyncio.sleep(0)
                        wire.writer.write_eof()
                    async with asyncio.timeout(8):
                        while await wire.next() is not None:
                            pass

            await asyncio.gather(*(one(session) for session in sessions))
            async with channel_to(proxy.address) as channel:
                await channel.unary_unary(INFER)(request_of())
            await proxy.until_at_rest()
            assert proxy.methods <= MAY_BE_ASKED

    with_no_bug(play)


@pytest.mark.slow
@SETTINGS
@given(st.lists(st.lists(FRAMES, max_size=25), min_size=20, max_size=20))
def test_a_triton_that_sends_anything(sessions):
    async def play():
        waiting = list(sessions)

        async def act(reader, writer):
            await reader.read(1000)
            writer.write(frames.settings({}) + b"".join(waiting.pop()))
            writer.write_eof()
            await reader.read()
            writer.close()

        async with proxy_before(echo, timeout_seconds=3) as proxy:
            server = await asyncio.start_server(act, "127.0.0.1", 0)
            proxy.triton = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

            async def one():
                async with wire_to(proxy.address) as wire:
                    wire.greet()
                    wire.send(request(1))
                    async with asyncio.timeout(8):
                        while True:
                            kind, flags, of, _ = await wire.next()
                            if of == 1 and (kind == frames.RST_STREAM or flags & 1):
                                break

            await asyncio.gather(*(one() for _ in sessions))
            await proxy.until_at_rest()
            server.close()

    with_no_bug(play)


def with_no_bug(play):
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record) if record.exc_info else None
    log = logging.getLogger("adapter")
    log.addHandler(handler)
    try:
        asyncio.run(play())
    finally:
        log.removeHandler(handler)
    assert [logging.Formatter().format(record) for record in seen] == []


@settings(max_examples=3 * settings().max_examples)
@given(st.data(), st.binary(max_size=40) | st.sampled_from([request_of(), request_of() * 2]))
def test_split_message_is_read_as_a_whole_one(data, message):
    cuts = data.draw(st.lists(st.integers(0, len(message)), max_size=5).map(sorted))
    pieces = [message[a:b] for a, b in zip([0, *cuts], [*cuts, len(message)], strict=True)]

    def judged(parts):
        watch = NameScanner(len(message))
        try:
            for part in parts:
                watch.feed(part)
            watch.end()
        except Malformed as error:
            return str(error)
        return None

    verdict = judged([message])
    assert judged(pieces) == verdict
    if verdict is None:
        read_field(message, 1)  # and by who reads it whole
    elif "more than once" not in verdict:
        with pytest.raises(InvalidRequest):
            read_field(message, 1)


@settings(max_examples=5 * settings().max_examples)
@given(
    st.binary(max_size=40)
    | st.sampled_from([request_of(), request_of("x" * 127), request_of("x" * 128)])
    | st.builds(lambda start, rest: start + rest, st.just(request_of()), st.binary(max_size=8)),
    st.integers(-1, 1),
    st.sampled_from([0, 1]),
)
def test_name_read_in_one_pass_is_everybodys(message, more, packed):
    framed = bytes([packed]) + max(0, len(message) + more).to_bytes(4, "big") + message
    name = plain_name(framed, MAX_MESSAGE)
    if name is not None:
        assert (more, packed) == (0, 0) or len(message) + more < 0
        watch = NameScanner(len(message))
        watch.feed(message)
        watch.end()
        assert name == first_name(framed, MAX_MESSAGE) == read_field(message, 1)


def test_the_usual_request_is_read_in_one_pass():
    assert plain_name(prefixed(request_of("m")), MAX_MESSAGE) == b"m"
    assert plain_name(prefixed(request_of("m")), 3) is None


NAMES = st.sampled_from([b":path", b"content-type", b"te", b"user-agent", b"grpc-timeout", b"x"])
VALUES = st.sampled_from([b"trailers", b"1m", b"y" * 130]) | st.binary(max_size=6)


def reading(read, block):
    """What a block means, or with which code it ends the connection."""
    try:
        return read(block)
    except ConnectionFault as fault:
        return fault.code


def whole(decoder: Decoder, block: bytes):
    """The same, by the HPACK of others."""
    try:
        return tuple((bytes(key), bytes(value)) for key, value in decoder.decode(block, raw=True))
    except (HPACKError, IndexError):
        return Code.COMPRESSION_ERROR


@settings(max_examples=3 * settings().max_examples)
@given(
    st.lists(st.lists(st.tuples(NAMES, VALUES), max_size=5), max_size=4),
    st.binary(max_size=12),
    st.booleans(),
)
def test_block_by_fields_means_the_whole_block(blocks, garbage, huffman):
    meanings = HeaderBlockCache(lambda headers: headers)
    encoder = Encoder()
    encoder.header_table_size = 0
    made = [encoder.encode(headers, huffman=huffman) for headers in blocks]
    for block in (*made, *map(encoded, blocks), garbage, *(block + garbage for block in made)):
        reader, other = HeaderReader(meanings, 2**15), Decoder()
        reader.expect_size_update()
        reader.read(b"\x20")  # an update of the table's size to 0; without one it has a table
        other.max_allowed_table_size = other.header_table_size = 0
        assert reading(reader.read, block) == whole(other, block)


@given(
    st.lists(st.lists(st.tuples(NAMES, VALUES), max_size=5), min_size=1, max_size=6),
    st.booleans(),
)
def test_oversized_header_block_still_updates_the_table(blocks, huffman):
    """Whether later blocks are read as another HPACK reads them, which has no limit."""
    encoder, other = Encoder(), Decoder()
    reader = HeaderReader(HeaderBlockCache(lambda headers: headers), 300)
    for headers in blocks:
        block = encoder.encode(headers, huffman=huffman)
        found = whole(other, block)
        size = sum(len(key) + len(value) + 32 for key, value in found)
        if size <= 300:
            assert reader.read(block) == found
        else:
            with pytest.raises(HeadersTooLarge) as fault:
                reader.read(block)
            assert found[: len(fault.value.headers)] == fault.value.headers
