"""Bodies that are still coming: nobody waits for them who has to go, nor for slow ones for ever."""

import asyncio
from dataclasses import replace

import pytest

from adapter.core.model import ModelId
from adapter.frontends.http import fast_path
from tests.frontends.http.listener import LANE, MIB, PATHS, head, opened, request, until
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
    async with opened(limits=LONG) as door, asyncio.timeout(SECONDS):
        caller = await door.connect()
        await caller.send(head(LANE, frame) + b"2\r\n{}")
        await until(lambda: door.in_flight() == 1)
        unloading = asyncio.create_task(door.house.unload("m"))
        await refused(caller)
        await unloading
        assert await caller.rest() == b""
        assert door.in_flight() == 0
        assert not [asked for asked in door.upstream.requests if asked.is_whole]


async def test_an_unload_does_not_wait_for_a_small_body_either_which_then_has_no_model():
    async with opened(limits=LONG) as door, asyncio.timeout(SECONDS):
        caller = await door.connect()
        await caller.send(head(LANE, FRAMES[0]) + b"{}")
        await until(lambda: any(not c.is_idle for c in door.lane._connections))
        await door.house.unload("m")
        await caller.send(bytes(998))
        assert (await caller.answer()).refusal == (404, "ModelNotFound")
        assert not door.upstream.requests


async def test_an_unload_waits_for_what_has_come_and_for_no_other_model():
    async with opened(limits=LONG) as door, asyncio.timeout(SECONDS):
        await door.house.load("other")
        begun, busy = await door.connect(), await door.connect()
        await begun.send(head("/models/other/invoke", FRAMES[0]) + b"{}")
        await busy.send(request(await door.waiting(LANE)))
        await door.reached.wait()
        await until(lambda: door.in_flight() == 1)
        unloading = asyncio.create_task(door.house.unload("m"))
        await until(lambda: door.house.control.registry.get(ModelId("m")).state.value != "READY")
        door.gate.set()
        assert (await busy.answer()).status == 200
        await unloading
        await begun.send(bytes(998))
        assert (await begun.answer()).status == 200


@both
@frames
async def test_a_drain_refuses_what_has_not_wholly_come(path, frame):
    async with opened(limits=LONG) as door, asyncio.timeout(SECONDS):
        caller = await door.connect()
        await caller.send(head(path, frame) + b"2\r\n{}")
        await until(lambda: any(not c.is_idle for c in door.lane._connections))
        door.drain.begin()
        closing = asyncio.create_task(door.lane.close(60))
        await refused(caller)
        assert await caller.rest() == b""
        caller.writer.close()
        await closing


async def test_a_body_that_is_begun_amid_a_drain_is_not_waited_for_either():
    async with opened(limits=LONG) as door, asyncio.timeout(SECONDS):
        caller = await door.connect()
        assert (await caller.ask(request(LANE))).status == 200
        door.drain.begin()
        await caller.send(head(LANE, FRAMES[0]) + b"{}")
        await refused(caller)


SLOW = replace(LONG, slow=0.2)


@both
@frames
async def test_a_body_below_the_least_rate_is_refused_and_the_connection_closes(path, frame):
    async with opened(limits=SLOW) as door, asyncio.timeout(SECONDS):
        caller = await door.connect()
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
    async with opened(limits=replace(SLOW, rate=1000)) as door, asyncio.timeout(SECONDS):
        caller = await door.connect()
        await caller.send(head(LANE, f"Content-Length: {size}"))
        for _ in range(32):
            await caller.send(bytes(size // 32))
            await asyncio.sleep(0.02)
        assert (await caller.answer()).status == 200


async def test_time_in_which_triton_does_not_read_is_not_the_callers():
    size, gate = 48 * MIB, asyncio.Event()

    async def script(talk):
        await gate.wait()
        await talk.body(talk.request_head)
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    script.reads_itself = True
    async with opened(script, limits=SLOW) as door, asyncio.timeout(30):
        caller = await door.connect()
        sending = asyncio.create_task(
            caller.send(head(LANE, f"Content-Length: {size}") + bytes(size))
        )
        await until(lambda: any(not c.transport.is_reading() for c in door.lane._connections))
        await asyncio.sleep(0.6)
        gate.set()
        await sending
        assert (await caller.answer()).status == 200


@pytest.mark.parametrize("frame", FRAMES[1:], ids=["fast", "by aiohttp"])
async def test_above_what_may_be_on_its_way_to_triton_a_large_body_waits_and_is_not_read(frame):
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as door, asyncio.timeout(SECONDS):
        inflight = door.lane.fast.inflight
        first, second = await door.connect(), await door.connect()
        await first.send(head(LANE, FRAMES[1]) + bytes(7 * MIB))
        await until(lambda: inflight.taken == 8 * MIB)
        is_chunked = frame == FRAMES[2]
        body = b"1000\r\n" + bytes(4096) + b"\r\n0\r\n\r\n" if is_chunked else bytes(8 * MIB)
        sending = asyncio.create_task(second.send(head(LANE, frame) + body))
        await until(lambda: inflight.waiting == 1)
        assert len(door.upstream.requests) == 0
        await first.send(bytes(MIB))
        assert (await first.answer()).status == 200
        assert (await second.answer()).status == 200
        await sending


@pytest.mark.parametrize("frame", FRAMES[1:], ids=["fast", "by aiohttp"])
async def test_who_leaves_before_its_turn_or_behind_it_keeps_nobody_waiting(frame):
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as door, asyncio.timeout(SECONDS):
        inflight = door.lane.fast.inflight
        first, second = await door.connect(), await door.connect()
        await first.send(head(LANE, FRAMES[1]) + bytes(7 * MIB))
        await until(lambda: inflight.taken == 8 * MIB)
        await second.send(head(LANE, frame) + b"2\r\n{}\r\n")
        await until(lambda: inflight.waiting == 1)
        second.reset()
        first.reset()
        await until(lambda: inflight.waiting == inflight.taken == door.in_flight() == 0)


@pytest.mark.parametrize("frame", FRAMES[1:], ids=["fast", "by aiohttp"])
async def test_an_unload_does_not_wait_for_who_waits_for_its_turn(frame):
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as door, asyncio.timeout(SECONDS):
        await door.house.load("other")
        first, second = await door.connect(), await door.connect()
        await first.send(head("/models/other/invoke", FRAMES[1]) + b"{}")
        await until(lambda: door.lane.fast.inflight.taken == 8 * MIB)
        await second.send(head(LANE, frame) + b"2\r\n{}\r\n")
        await until(lambda: door.lane.fast.inflight.waiting == 1)
        unloading = asyncio.create_task(door.house.unload("m"))
        await refused(second)
        await unloading
        first.reset()


async def test_no_more_than_so_much_of_all_small_bodies_is_gathered(monkeypatch):
    """What would be too much goes on as it comes."""
    size, most = 200_000, 2**19
    monkeypatch.setattr(fast_path, "_ALL_HELD_BYTES", most)
    async with opened() as door:
        callers = [await door.connect() for _ in range(4)]
        for caller in callers:
            await caller.send(head(LANE, f"Content-Length: {size}") + b" " * 1000)
        await until(lambda: door.in_flight() == 2)  # these two have a lease already
        assert door.lane.fast.held == 2 * size <= most
        for caller in callers:
            await caller.send(b" " * (size - 1002) + b"{}")
            assert (await caller.answer()).status == 200
        assert door.lane.fast.held == 0
