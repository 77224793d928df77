"""Frames of a stream that has ended: they cost the other calls of the connection nothing.

A peer may have sent them before it learned of the end, and grpc-java sends DATA behind its own
RST_STREAM. Triton, which ignores them all, is the judge: an innocent call that it answers on the
same connection is answered by the adapter too.
"""

import asyncio
from contextlib import closing
from itertools import product

import pytest
from hpack import Decoder

from adapter.relay import downstream, frames
from adapter.relay.frames import Code
from adapter.relay.headers import encoded
from tests.cases import case
from tests.fakes.http2_triton import GOOD, HEAD, answer, scripted_triton
from tests.frontends.grpc.proxy_listener import (
    INFER,
    Wire,
    begin,
    big_request,
    complete,
    echo,
    frame,
    head_of,
    prefixed,
    proxy_before,
    request,
    request_of,
    wire_to,
)
from tests.running import COMPLETE, embedded_adapter
from tests.trees import write_python_model

EARLIER, ENDED, LATER = 1, 3, 5
OK = b"0"
TRAILERS = b"\x20" + encoded([(b"x-late", b"1")])
# RFC 7541 section 6.2.1: this one goes into the table, where its index is 62
TABLE_TRAILERS = b"\x40\x06x-late\x011"
FIRST_OF_TABLE = b"\xbe"


HALF = frame(frames.DATA, 0, ENDED, prefixed(request_of())[:20])
RESET = frames.reset(ENDED, Code.CANCEL)
# what a client sends, and whether the server ends the stream then
ENDINGS: dict[str, tuple[bytes, bool]] = {
    "the client resets a request without DATA": (begin(ENDED) + RESET, False),
    "the client resets half a request": (begin(ENDED) + HALF + RESET, False),
    "the client resets a complete request": (request(ENDED) + RESET, False),
    "the client has sent END_STREAM": (request(ENDED), False),
    "the answer is complete": (request(ENDED), True),
    "the answer is complete before the request": (begin(ENDED, "/nobody.Serves/This"), True),
    "its deadline passes": (begin(ENDED, INFER, (b"grpc-timeout", b"50m")), True),
}


async def end(wire: Wire, way: str) -> None:
    sent, is_ended_by_server = ENDINGS[way]
    wire.send(sent)
    while is_ended_by_server:
        found = await wire.next()
        assert found is not None, f"no end of {ENDED} in {wire.got}"
        kind, flags, stream_id, _ = found
        is_last = kind == frames.RST_STREAM or (kind == frames.HEADERS and flags & 1)
        is_ended_by_server = not (stream_id == ENDED and is_last)


LATE = {
    "DATA": complete(ENDED),
    "DATA without END_STREAM": frame(frames.DATA, 0, ENDED, prefixed(request_of())),
    "DATA of no bytes": frame(frames.DATA, frames.END_STREAM, ENDED),
    "padded DATA": frame(frames.DATA, frames.PADDED, ENDED, b"\x03abc" + bytes(3)),
    "a whole frame of DATA": frame(frames.DATA, 0, ENDED, bytes(2**14)),
    "several frames of DATA": frame(frames.DATA, 0, ENDED, bytes(100)) * 3 + complete(ENDED),
    "trailers": frames.header_block(ENDED, TRAILERS, end=True),
    "trailers and CONTINUATION": (
        frame(frames.HEADERS, frames.END_STREAM, ENDED, TRAILERS[:4])
        + frame(frames.CONTINUATION, frames.END_HEADERS, ENDED, TRAILERS[4:])
    ),
    "HEADERS of a request": begin(ENDED),
    "WINDOW_UPDATE": frames.window_update(ENDED, 100),
    "PRIORITY": frame(frames.PRIORITY, 0, ENDED, bytes(5)),
    "RST_STREAM": RESET,
    "RST_STREAM, then DATA": RESET + complete(ENDED),
}


async def innocents_are_answered(address: str, way: str, late: str) -> bool:
    """Whether the calls before and behind these frames on one connection succeed."""
    async with wire_to(address) as wire:
        wire.greet()
        wire.send(begin(EARLIER))
        await end(wire, way)
        wire.send(LATE[late], complete(EARLIER), request(LATER))
        return await statuses(wire, EARLIER, LATER) == {EARLIER: OK, LATER: OK}


async def statuses(wire: Wire, *stream_ids: int) -> dict[int, bytes]:
    """Return what gRPC status each stream ended with; some are missing where the connection ended.

    All header blocks since the first are decoded: Triton uses its table.
    """
    decoder = Decoder()
    found: dict[int, bytes] = {}
    position = 0
    while not found.keys() >= set(stream_ids):
        if position == len(wire.got) and await wire.next() is None:
            break
        kind, flags, stream_id, payload = wire.got[position]
        position += 1
        if kind == frames.HEADERS:
            headers = dict(decoder.decode(payload, raw=True))
            if flags & frames.END_STREAM:
                found[stream_id] = headers.get(b"grpc-status", b"none")
        elif kind == frames.RST_STREAM:
            found.setdefault(stream_id, b"reset")
    return {stream_id: found[stream_id] for stream_id in stream_ids if stream_id in found}


async def test_late_frames_cost_no_other_call(proxy):
    for way, late in product(ENDINGS, LATE):
        with case(way, late):
            assert await innocents_are_answered(proxy.address, way, late)
    await proxy.until_free("m")


async def test_late_data_is_answered_by_one_reset(proxy, wire):
    """RFC 9113 section 5.4.2: a second RST_STREAM could cross with another one for ever."""
    wire.send(begin(ENDED), RESET)
    wire.send(LATE["DATA without END_STREAM"] * 5, request(LATER))
    assert await statuses(wire, LATER) == {LATER: OK}
    assert [frame[2] for frame in wire.got if frame[0] == frames.RST_STREAM] == [ENDED]


async def test_late_frames_of_a_refused_stream_cost_nothing(monkeypatch):
    """A client may learn of the limit of streams when it has sent all of its request."""
    monkeypatch.setattr(downstream, "MAX_STREAMS", 1)
    for late, sent in LATE.items():
        async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
            with case(late):
                wire.greet()
                wire.send(begin(EARLIER), begin(ENDED), sent, complete(EARLIER))
                assert await statuses(wire, EARLIER) == {EARLIER: OK}


async def test_late_trailers_still_change_the_table(proxy):
    """RFC 9113 section 4.3: header blocks of a closed stream are decoded for what they change."""
    trailers = frames.header_block(ENDED, TABLE_TRAILERS, end=True)
    again = frames.header_block(LATER, head_of()[1:] + FIRST_OF_TABLE, end=False)
    async with wire_to(proxy.address) as wire:
        wire.send(frames.PREFACE, frames.settings({}))
        wire.send(frames.header_block(ENDED, head_of()[1:], end=False))
        wire.send(RESET, trailers, again, complete(LATER))
        assert await statuses(wire, LATER) == {LATER: OK}


# what Triton may have sent before it learned that its stream was reset
LATE_ANSWERS = {
    "a whole answer": answer(1, b"x" * 100),
    "an answer's head": frames.header_block(1, HEAD, end=False),
    "DATA": frame(frames.DATA, 0, 1, bytes(100)),
    "a whole frame of DATA": frame(frames.DATA, 0, 1, bytes(2**14)),
    "padded DATA": frame(frames.DATA, frames.PADDED, 1, b"\x03abc" + bytes(3)),
    "trailers": frames.header_block(1, GOOD, end=True),
    "trailers and CONTINUATION": (
        frame(frames.HEADERS, frames.END_STREAM, 1, GOOD[:4])
        + frame(frames.CONTINUATION, frames.END_HEADERS, 1, GOOD[4:])
    ),
    "WINDOW_UPDATE": frames.window_update(1, 100),
    "PRIORITY": frame(frames.PRIORITY, 0, 1, bytes(5)),
    "RST_STREAM": frames.reset(1, Code.NO_ERROR),
}


async def test_late_frames_of_triton_cost_no_other_call():
    """The caller of stream 1 cancels an incomplete request, which is reset at Triton."""
    half = frame(frames.DATA, 0, EARLIER, prefixed(big_request("m", 2**20))[:1000])
    for late, sent in LATE_ANSWERS.items():
        with case(late):
            async with (
                proxy_before(echo) as proxy,
                scripted_triton(proxy) as upstream,
                wire_to(proxy.address) as wire,
            ):
                wire.greet()
                wire.send(begin(EARLIER), half)
                triton = await upstream.accepted()
                wire.send(request(LATER))
                await triton.until(frames.DATA, 3)
                wire.send(frames.reset(EARLIER, Code.CANCEL))
                await triton.until(frames.RST_STREAM, 1)
                triton.send(sent, answer(3))
                assert await statuses(wire, LATER) == {LATER: OK}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with embedded_adapter(f"--model-roots={root}", "--grpc-data=127.0.0.1:0", COMPLETE) as running:
        with closing(running.client()) as client:
            assert client.load("m", write_python_model(root / "m")).status == 200
        yield running


@pytest.mark.triton
@pytest.mark.parametrize("listener", ["grpc", "grpc_data"])
def test_late_frames_cost_what_they_cost_at_triton(adapter, listener):
    async def compare_all() -> None:
        answered = 0
        for way, late in product(ENDINGS, LATE):
            with case(way, late):
                if await innocents_are_answered(adapter.grpc_address, way, late):
                    answered += 1
                    assert await innocents_are_answered(adapter.listeners[listener], way, late)
        # Triton 2.51 ends the connection for CONTINUATION of a closed stream, and for nothing else
        assert answered >= len(ENDINGS) * (len(LATE) - 1)

    asyncio.run(compare_all())
