"""On one connection requests are planned or go to handlers in any order: each has its own answer.

They are sent behind one another and cut anywhere. For minutes: tests/nightly/test_fuzz_http.py.
"""

import asyncio
import logging
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from adapter.core.model import ModelId
from tests.frontends.http.listener import (
    HANDLED,
    Caller,
    Listener,
    head,
    request,
    until,
)

SECONDS = 60  # for all answers of one connection


# A field that comes twice: an inference whose head has it is not planned.
HANDLED_FIELDS = ("X-A: 1", "X-A: 2")
IDS = (
    "X-Request-Id: 7",
    "X-Amzn-SageMaker-Inference-Id: i",
    "X-Amzn-SageMaker-Custom-Attributes: a=b",
)


async def unknown(listener: Listener) -> str:
    return "nobody"


async def being_loaded(listener: Listener) -> str:
    gate = listener.fakes.calls.hold("load")
    listener.fakes.begin(listener.fakes.load("slow"))
    await gate.reached.wait()
    return "slow"


async def too_deep(listener: Listener) -> str:
    return "m"


async def starting(listener: Listener) -> str:
    listener.fakes.start_again()
    return "nobody"


async def refused_by(
    listener: Listener, data: list[bytes], caplog: pytest.LogCaptureFixture
) -> tuple[bytes, dict[str, object]]:
    """All bytes of the answer but those of the date, and the fields of its line in the log."""
    caplog.clear()
    caller = await listener.connect()
    for piece in data:
        await caller.send(piece)
        await asyncio.sleep(0.01)
    raw = await caller.reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", raw)
    assert length is not None
    body = await caller.reader.readexactly(int(length[1]))
    (line,) = [record for record in caplog.records if record.message == "request.failed"]
    standard = vars(logging.makeLogRecord({})).keys()
    fields = {name: value for name, value in vars(line).items() if name not in standard}
    assert (await caller.ask(request(HANDLED))).status == 200, "the connection goes on"
    return re.sub(rb"Date: [^\r]+", b"Date:", raw) + body, fields


@pytest.mark.parametrize("pieces", [1, 2], ids=["whole", "the body behind its head"])
@pytest.mark.parametrize("path", ["/models/{}/invoke", "/v2/models/{}/infer"])
@pytest.mark.parametrize("why", [unknown, being_loaded, too_deep, starting])
async def test_both_paths_refuse_with_same_bytes_and_log(
    listener: Listener,
    why: Callable[[Listener], Awaitable[str]],
    path: str,
    pieces: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = b"[" * 2000 if why is too_deep else b'{"a":1}'
    caplog.set_level(logging.INFO)
    target = path.format(await why(listener))
    kind = ("v2", "infer") if target.startswith("/v2") else ("sagemaker", "invoke")
    found = []
    for more in ((), HANDLED_FIELDS):
        raw = request(target, body, *IDS, *more)
        cut = [raw] if pieces == 1 else [raw[: -len(body)], raw[-len(body) :]]
        before = listener.served(*kind)
        codes = dict(before.codes)
        found.append(await refused_by(listener, cut, caplog))
        served = listener.served(*kind)
        status = int(found[-1][0].split()[1])
        assert served.codes[status] > codes.get(status, 0)
    assert listener.handled.count(target) == 1
    assert found[0] == found[1]
    listener.fakes.calls.open_all()


@pytest.mark.parametrize("name", ["Authorization", "X-Amz-Date", "traceparent"])
@pytest.mark.parametrize("path", ["/models/nobody/invoke", "/v2/models/nobody/infer"])
async def test_refusal_is_logged_despite_repeated_header(
    listener: Listener, caller: Caller, path: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with asyncio.timeout(SECONDS):
        lines = (f"{name}: a", f"{name}: b", "X-Request-Id: 7")
        for target, status in ((path, 404), (path.replace("nobody", "m"), 200)):
            await caller.send(request(target, b"{}", *lines))
            assert (await caller.answer()).status == status
    assert [r.message for r in caplog.records if r.exc_info] == []
    assert "7" in {getattr(r, "request_id", None) for r in caplog.records}


@pytest.mark.parametrize("path", ["/models/nobody/invoke", "/v2/models/nobody/infer"])
async def test_refusal_calls_less_code_than_an_answer(
    listener: Listener, caller: Caller, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)  # a flood of them leaves few lines, as the next test says
    async with asyncio.timeout(SECONDS):
        counts = []
        for target in (path, path.replace("nobody", "m")):
            await caller.ask(request(target))
            with counted_calls() as calls:
                await caller.ask(request(target))
            counts.append(calls.total())
        assert counts[0] <= counts[1], counts


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Calls of Python functions of the adapter, by their names."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("adapter."):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("more", [(), HANDLED_FIELDS], ids=["planned", "handled"])
async def test_caller_who_leaves_early_is_no_answer(
    listener: Listener, caller: Caller, more: tuple[str, ...]
) -> None:
    """An answer ends a row of failures, by which a lack of memory is believed."""
    await caller.send(head("/v2/models/m/infer", "Transfer-Encoding: chunked", *more))
    await until(lambda: listener.in_flight() == 1)
    caller.reset()
    await until(lambda: listener.in_flight() == 0)
    usage = listener.fakes.control.registry.serving(ModelId("m")).usage
    assert (usage.answered_at, [*usage.latencies]) == (0, [])


@pytest.mark.parametrize("more", [(), HANDLED_FIELDS], ids=["planned", "handled"])
async def test_refusal_flood_logs_some_lines_and_sum(
    listener: Listener, more: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caller, raw = await listener.connect(), request("/models/nobody/invoke", b"{}", *more)
    sending = asyncio.create_task(caller.send(raw * 200))
    for _ in range(200):
        assert (await caller.answer()).status == 404
    await sending
    lines = summed_up = 0
    while lines + summed_up < 200:
        await asyncio.sleep(0.01)
        lines = sum(each.message == "request.failed" for each in caplog.records)
        summed_up = sum(getattr(each, "requests", 0) for each in caplog.records)
    assert lines + summed_up == 200
    assert summed_up


async def test_thousand_pipelined_refusals_come_in_order(
    listener: Listener, caller: Caller
) -> None:
    names = [f"nobody{number}" for number in range(1500)]
    data = b"".join(request(f"/models/{name}/invoke") for name in names)
    sending = asyncio.create_task(caller.send(data))
    for name in names:
        found = await caller.answer()
        assert (found.status, found.json()["model_name"]) == (404, name)
    await sending
    assert listener.handled == []
