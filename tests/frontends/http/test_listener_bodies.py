"""Bodies that are still coming: nobody waits for them who has to go, nor for slow ones for ever."""

import asyncio
from dataclasses import replace

import pytest

from adapter.core.model import ModelId
from adapter.frontends.http import fast_path
from adapter.protocols.content_types import ContentTypes, Tensor
from tests.frontends.http.listener import FAST, MIB, PATHS, head, opened, request, until
from tests.frontends.http.test_listener_ends import LONG

NOT_STARTED = "x-triton-adapter-not-started"
FRAMES = ["Content-Length: 1000", f"Content-Length: {8 * MIB}", "Transfer-Encoding: chunked"]
SECONDS = 10

both = pytest.mark.parametrize("path", PATHS)
frames = pytest.mark.parametrize("frame", FRAMES, ids=["whole", "streamed", "chunked"])


async def refused(caller) -> None:
    found = await caller.answer()
    assert found.refusal == (503, "NotStarted")
    assert (found.headers[NOT_STARTED], found.headers["connection"]) == ("1", "close")


@pytest.mark.parametrize("frame", FRAMES[1:], ids=["streamed", "chunked"])
async def test_an_unload_refuses_what_has_not_wholly_come_and_does_not_wait_for_it(frame):
    async with opened(limits=LONG) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        await caller.send(head(FAST, frame) + b"2\r\n{}")
        await until(lambda: listener.in_flight() == 1)
        unloading = asyncio.create_task(listener.house.unload("m"))
        await refused(caller)
        await unloading
        assert await caller.rest() == b""
        assert listener.in_flight() == 0
        assert not [asked for asked in listener.upstream.requests if asked.is_whole]


async def test_an_unload_does_not_wait_for_a_small_body_either_which_then_has_no_model():
    async with opened(limits=LONG) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        await caller.send(head(FAST, FRAMES[0]) + b"{}")
        await until(lambda: any(not c.is_idle for c in listener.server._connections))
        await listener.house.unload("m")
        await caller.send(bytes(998))
        assert (await caller.answer()).refusal == (404, "ModelNotFound")
        assert not listener.upstream.requests


async def test_an_unload_waits_for_what_has_come_and_for_no_other_model():
    async with opened(limits=LONG) as listener, asyncio.timeout(SECONDS):
        await listener.house.load("other")
        begun, busy = await listener.connect(), await listener.connect()
        await begun.send(head("/models/other/invoke", FRAMES[0]) + b"{}")
        await busy.send(request(await listener.waiting(FAST)))
        await listener.reached.wait()
        await until(lambda: listener.in_flight() == 1)
        unloading = asyncio.create_task(listener.house.unload("m"))
        await until(
            lambda: listener.house.control.registry.get(ModelId("m")).state.value != "READY"
        )
        listener.gate.set()
        assert (await busy.answer()).status == 200
        await unloading
        await begun.send(bytes(998))
        assert (await begun.answer()).status == 200


@both
@frames
async def test_a_drain_refuses_what_has_not_wholly_come(path, frame):
    async with opened(limits=LONG) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        await caller.send(head(path, frame) + b"2\r\n{}")
        await until(lambda: any(not c.is_idle for c in listener.server._connections))
        listener.drain.begin()
        closing = asyncio.create_task(listener.server.close(60))
        await refused(caller)
        assert await caller.rest() == b""
        caller.writer.close()
        await closing


async def test_a_body_that_is_begun_amid_a_drain_is_not_waited_for_either():
    async with opened(limits=LONG) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        assert (await caller.ask(request(FAST))).status == 200
        listener.drain.begin()
        await caller.send(head(FAST, FRAMES[0]) + b"{}")
        await refused(caller)


SLOW = replace(LONG, slow=0.2)


@both
@frames
async def test_a_body_below_the_least_rate_is_refused_and_the_connection_closes(path, frame):
    async with opened(limits=SLOW) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        await caller.send(head(path, frame) + b"2\r\n{}\r\n")

        async def dribble() -> None:
            while True:
                await caller.send(b"1\r\n \r\n")
                await asyncio.sleep(0.01)

        dribbling = asyncio.create_task(dribble())
        found = await caller.answer()
        assert found.refusal == (408, "SlowBody")
        assert found.headers["connection"] == "close"
        dribbling.cancel()
        await asyncio.wait([dribbling])


async def test_a_body_that_comes_fast_enough_is_taken_however_long_it_takes():
    size = 4 * MIB
    async with opened(limits=replace(SLOW, rate=1000)) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        await caller.send(head(FAST, f"Content-Length: {size}") + bytes(size // 32))
        for _ in range(31):
            await asyncio.sleep(0.02)
            await caller.send(bytes(size // 32))
        assert (await caller.answer()).status == 200


async def test_time_in_which_triton_does_not_read_is_not_the_callers():
    size, gate = 48 * MIB, asyncio.Event()

    async def script(talk):
        await gate.wait()
        await talk.body(talk.request_head)
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    script.reads_itself = True
    async with opened(script, limits=SLOW) as listener, asyncio.timeout(30):
        caller = await listener.connect()
        sending = asyncio.create_task(
            caller.send(head(FAST, f"Content-Length: {size}") + bytes(size))
        )
        await until(lambda: any(not c.transport.is_reading() for c in listener.server._connections))
        await asyncio.sleep(0.6)
        gate.set()
        await sending
        assert (await caller.answer()).status == 200


@pytest.mark.parametrize("frame", FRAMES[1:], ids=["fast", "by aiohttp"])
async def test_above_what_may_be_on_its_way_to_triton_a_large_body_waits_and_is_not_read(frame):
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as listener, asyncio.timeout(SECONDS):
        inflight = listener.server.fast.inflight
        first, second = await listener.connect(), await listener.connect()
        await first.send(head(FAST, FRAMES[1]) + bytes(7 * MIB))
        await until(lambda: inflight.taken == 8 * MIB)
        is_chunked = frame == FRAMES[2]
        body = b"1000\r\n" + bytes(4096) + b"\r\n0\r\n\r\n" if is_chunked else bytes(8 * MIB)
        sending = asyncio.create_task(second.send(head(FAST, frame) + body))
        await until(lambda: inflight.waiting == 1)
        assert len(listener.upstream.requests) == 0
        await first.send(bytes(MIB))
        assert (await first.answer()).status == 200
        assert (await second.answer()).status == 200
        await sending


@pytest.mark.parametrize("content_type", ["image/png", "text/csv"])
async def test_a_body_that_is_held_whole_counts_until_it_is_answered(content_type):
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as listener, asyncio.timeout(SECONDS):
        inflight, house = listener.server.fast.inflight, listener.house
        is_text = content_type == "text/csv"
        tensor = Tensor("IN", "FP32" if is_text else "BYTES", (-1, -1) if is_text else (1,))
        record = house.control.registry.serving(ModelId("m"))
        record.content_types = ContentTypes(
            (content_type,), casts=False, is_batched=False, input=tensor, outputs=()
        )
        target = await listener.waiting(FAST)
        caller = await listener.connect()
        asked = head(target, FRAMES[2], f"Content-Type: {content_type}")
        await caller.send(asked + b"3\r\n1,2\r\n0\r\n\r\n")
        await listener.reached.wait()
        assert inflight.taken > 0
        listener.gate.set()
        assert (await caller.answer()).status == 200
        await until(lambda: inflight.taken == 0)


@pytest.mark.parametrize("frame", FRAMES[1:], ids=["fast", "by aiohttp"])
async def test_who_leaves_before_its_turn_or_behind_it_keeps_nobody_waiting(frame):
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as listener, asyncio.timeout(SECONDS):
        inflight = listener.server.fast.inflight
        first, second = await listener.connect(), await listener.connect()
        await first.send(head(FAST, FRAMES[1]) + bytes(7 * MIB))
        await until(lambda: inflight.taken == 8 * MIB)
        await second.send(head(FAST, frame) + b"2\r\n{}\r\n")
        await until(lambda: inflight.waiting == 1)
        second.reset()
        first.reset()
        await until(lambda: inflight.waiting == inflight.taken == listener.in_flight() == 0)


@pytest.mark.parametrize("frame", FRAMES[1:], ids=["fast", "by aiohttp"])
async def test_an_unload_does_not_wait_for_who_waits_for_its_turn(frame):
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as listener, asyncio.timeout(SECONDS):
        await listener.house.load("other")
        first, second = await listener.connect(), await listener.connect()
        await first.send(head("/models/other/invoke", FRAMES[1]) + b"{}")
        await until(lambda: listener.server.fast.inflight.taken == 8 * MIB)
        await second.send(head(FAST, frame) + b"2\r\n{}\r\n")
        await until(lambda: listener.server.fast.inflight.waiting == 1)
        unloading = asyncio.create_task(listener.house.unload("m"))
        await refused(second)
        await unloading
        first.reset()


async def test_no_more_than_so_much_of_all_small_bodies_is_gathered(monkeypatch):
    """What would be too much goes on as it comes."""
    size, most = 200_000, 2**19
    monkeypatch.setattr(fast_path, "_ALL_HELD_BYTES", most)
    async with opened() as listener:
        callers = [await listener.connect() for _ in range(4)]
        for caller in callers:
            await caller.send(head(FAST, f"Content-Length: {size}") + b" " * 1000)
        await until(lambda: listener.in_flight() == 2)  # these two have a lease already
        assert listener.server.fast.held == 2 * size <= most
        for caller in callers:
            await caller.send(b" " * (size - 1002) + b"{}")
            assert (await caller.answer()).status == 200
        assert listener.server.fast.held == 0
