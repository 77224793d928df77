"""Compressed requests: small ones are decompressed by the relay, and go to Triton directly."""

import gzip
import random
import zlib

import pytest

from adapter.relay import frames
from tests.cases import case
from tests.frontends.grpc.proxy_listener import (
    INFER,
    begin,
    echo,
    frame,
    prefixed,
    request_of,
    status,
    wire_to,
)

KIB = 2**10
ENCODERS = {b"gzip": gzip.compress, b"deflate": zlib.compress}


def compressed(data: bytes) -> bytes:
    return b"\1" + prefixed(data)[1:]


async def call(proxy, data: bytes, encoding: bytes | None, piece_bytes: int = 2**14):
    """Return the message and the trailers of an inference."""
    named = [(b"content-length", b"%d" % len(data))]
    if encoding is not None:
        named.append((b"grpc-encoding", encoding))
    async with wire_to(proxy.address) as wire:
        wire.greet({frames.INITIAL_WINDOW_SIZE: 2**24})
        wire.send(frames.window_update(0, 2**24))
        wire.send(begin(1, INFER, *named))
        for at in range(0, len(data), piece_bytes):
            end = frames.END_STREAM if at + piece_bytes >= len(data) else 0
            wire.send(frame(frames.DATA, end, 1, data[at : at + piece_bytes]))
        return await wire.answer(1)


@pytest.mark.parametrize("encoding", ENCODERS)
@pytest.mark.parametrize("piece_bytes", [1, 7, 40, 2**14])
async def test_small_compressed_request_goes_to_triton_directly(proxy, encoding, piece_bytes):
    message = request_of("m", 1.0, 2.0, id="7")
    data = compressed(ENCODERS[encoding](message))
    answer, trailers = await call(proxy, data, encoding, piece_bytes)
    assert status(trailers) == "OK"
    assert answer[5:] == await echo(message, None)
    assert proxy.counted("OK") == 1
    await proxy.until_at_rest()


async def test_plain_request_of_compressing_client_goes_directly(proxy):
    """A client may send messages as they are though its header names an encoding."""
    message = request_of("m", 1.0)
    answer, trailers = await call(proxy, prefixed(message), b"gzip")
    assert (status(trailers), answer[5:]) == ("OK", await echo(message, None))
    assert proxy.counted("OK") == 1


async def test_large_compressed_request_goes_to_fallback_server(proxy):
    """Decompressing it would take milliseconds of the event loop."""
    drawn = random.Random(1)
    cases = {
        "much of little": request_of("m", *[1.0] * (100 * KIB)),
        "little of much": request_of("m", *[drawn.random() for _ in range(100 * KIB)]),
    }
    for name, message in cases.items():
        with case(name):
            answer, trailers = await call(proxy, compressed(gzip.compress(message)), b"gzip")
            assert (status(trailers), answer[5:]) == ("OK", await echo(message, None))
            assert not proxy.counted("OK")
            await proxy.until_at_rest()


async def test_compressed_request_of_renamed_model_is_answered(proxy):
    """The fallback server gets it decompressed: content-length does not fit any more."""
    message = request_of("team/a", 1.0)
    answer, trailers = await call(proxy, compressed(gzip.compress(message)), b"gzip")
    assert status(trailers) == "OK"
    assert b"team/a" in answer


async def test_compressed_request_over_limit_is_refused(proxy):
    data = compressed(gzip.compress(request_of("m", *[1.0] * (10 * KIB * KIB))))
    _, trailers = await call(proxy, data, b"gzip")
    assert status(trailers) == "RESOURCE_EXHAUSTED"
    await proxy.until_at_rest()


async def test_badly_compressed_request_fails_alone(proxy):
    message = request_of("m", 1.0)
    good = gzip.compress(message)
    cases = {
        "no encoding is named": (compressed(good), None),
        "another encoding is named": (compressed(zlib.compress(message)), b"gzip"),
        "identity is named": (compressed(good), b"identity"),
        "it breaks off": (compressed(good[:-1]), b"gzip"),
        "its checksum is wrong": (compressed(good[:-8] + bytes(8)), b"gzip"),
        "its length is wrong": (compressed(good)[:-1], b"gzip"),
        "nothing was compressed": (compressed(b""), b"gzip"),
        "it is no inference": (compressed(gzip.compress(b"\xff" * 20)), b"gzip"),
    }
    for name, (data, encoding) in cases.items():
        with case(name):
            _, trailers = await call(proxy, data, encoding)
            assert status(trailers) != "OK"
            _, trailers = await call(proxy, compressed(good), b"gzip")
            assert status(trailers) == "OK"
    await proxy.until_at_rest()
