"""Update a model while it gets 50 calls a second: by new versions in a store, and by V2 loads.

The calls come at their times, whatever the answers do (an open loop), and each answer tells the
version that gave it. Models really take their memory: in one limit both versions fit, in the other
one they do not.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import aiohttp
import pytest

from tests.journeys.endpoint.folder_store import Store
from tests.journeys.v2.calls import Repository
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]

_RATE = 50  # calls a second
_QUIET_SECONDS = 2.0  # of calls before the first update and after each one
_OUTCOME_SECONDS = 60.0
_HOLD_MIB = 100
_HOLD = f"import numpy\nself.held = numpy.ones({_HOLD_MIB} * 2**20, numpy.uint8)\n"
_LIMITS = {"beside": "800MiB", "in place": "200MiB"}
_FAILURES = {
    "inspection": {"config": CONFIG.replace("max_batch_size: 0", "max_batch_size: -1")},
    "load": {"initialize": "raise ValueError('no such luck')"},
    "memory": {"initialize": "raise MemoryError('no such luck')"},
}


@dataclass
class Answer:
    """Holds what a call got."""

    sent_at: float
    at: float
    status: int
    version: float | None  # of an answer with status 200
    text: str


@dataclass
class Traffic:
    """Calls of one model, which are sent 50 times a second."""

    url: str
    headers: dict[str, str]
    answers: list[Answer] = field(default_factory=list)
    _calls: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Send calls for as long as the block takes, and wait for their answers then."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            sender = asyncio.create_task(self._send_calls(session))
            try:
                yield
            finally:
                sender.cancel()
                with suppress(asyncio.CancelledError):
                    await sender
                if self._calls:
                    await asyncio.wait(self._calls)

    async def _send_calls(self, session: aiohttp.ClientSession) -> None:
        started_at = time.monotonic()
        number = 0
        while True:
            number += 1
            call = asyncio.create_task(self._call(session))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            await asyncio.sleep(max(0.0, started_at + number / _RATE - time.monotonic()))

    async def _call(self, session: aiohttp.ClientSession) -> None:
        sent_at = time.monotonic()
        try:
            reply = await session.post(self.url, json=infer_body(0.0), headers=self.headers)
            text = await reply.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.answers.append(Answer(sent_at, time.monotonic(), 0, None, repr(error)))
            return
        version = json.loads(text)["outputs"][0]["data"][0] if reply.status == 200 else None
        self.answers.append(Answer(sent_at, time.monotonic(), reply.status, version, text))


class Door(Protocol):
    """A way to update the model `m`."""

    def calls(self) -> Traffic:
        """Return the calls of the model."""

    def put(self, number: int, **parts: str) -> None:
        """Have the model load the version that adds this number."""

    def wait_for_outcome(self, number: int, *, is_good: bool) -> None:
        """Wait until the update has ended, well or not."""


class StoreDoor:
    """Puts versions into a store, which the adapter asks each second."""

    def __init__(self, adapter: RunningAdapter, store: Store) -> None:
        self._adapter = adapter
        self._store = store
        self._lines_before = 0
        self._answers_before = 0
        url = f"http://{adapter.http}/endpoints/any/invocations"
        self._traffic = Traffic(url, {"X-Amzn-SageMaker-Target-Model": "m"})

    def calls(self) -> Traffic:
        return self._traffic

    def put(self, number: int, **parts: str) -> None:
        self._lines_before = len(self._adapter.lines)
        self._answers_before = len(self._traffic.answers)
        initialize = parts.pop("initialize", _HOLD)
        self._store.put("m", number, initialize=initialize, **parts)

    def wait_for_outcome(self, number: int, *, is_good: bool) -> None:
        """The old version may be loaded again meanwhile, so a good one is known by its answers."""

        def is_over() -> bool:
            if is_good:
                answers = self._traffic.answers[self._answers_before :]
                return any(answer.version == number for answer in answers)
            lines = self._adapter.lines[self._lines_before :]
            return any(line["event"] == "model.not_renewed" for line in lines)

        wait_until(is_over, _OUTCOME_SECONDS, f"the update to version {number}")


class V2Door:
    """Loads versions by V2's repository extension."""

    def __init__(self, adapter: RunningAdapter, folder: Path) -> None:
        self._adapter = adapter
        self._folder = folder
        self._files: dict[str, bytes] = {}
        self._config = ""

    def calls(self) -> Traffic:
        return Traffic(f"http://{self._adapter.http}/v2/models/m/infer", {})

    def put(self, number: int, **parts: str) -> None:
        initialize = parts.pop("initialize", _HOLD)
        answer = f"values = values + {number}"
        package = write_python_model(self._folder, initialize=initialize, answer=answer)
        self._files = {"1/model.py": (package / "1" / "model.py").read_bytes()}
        is_odd = "config" in parts
        tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
        self._config = json.dumps(
            {
                "backend": "python",
                "max_batch_size": -1 if is_odd else 0,
                "input": [{"name": "IN", **tensor}],
                "output": [{"name": "OUT", **tensor}],
                "parameters": {"memory_bytes": {"string_value": f"{_HOLD_MIB}MiB"}},
            }
        )

    def wait_for_outcome(self, number: int, *, is_good: bool) -> None:
        with closing(self._adapter.client()) as client:
            reply = Repository(client).load_files("m", self._files, json.loads(self._config))
        assert (reply.status == 200) == is_good, reply.body


def find_older(answers: Sequence[Answer], deployed: Sequence[int]) -> list[Answer]:
    """Return the answers of a version that is older than one that was given before their call.

    A version that was deployed twice, by a rollback, may be either.
    """
    good = [answer for answer in answers if answer.version is not None]
    good.sort(key=lambda answer: answer.at)
    places: list[tuple[float, int]] = []  # when an answer came, and the newest place until then
    older = []
    for answer in good:
        newest = max((place for at, place in places if at <= answer.sent_at), default=0)
        candidates = [n for n in range(newest, len(deployed)) if deployed[n] == answer.version]
        if not candidates:
            older.append(answer)
        elif not places or candidates[0] > places[-1][1]:
            places.append((answer.at, candidates[0]))
    return older


def count_failures(answers: Sequence[Answer]) -> Counter[str]:
    """Return how often each failure came."""
    return Counter(
        f"{answer.status} {answer.text[:160]}" for answer in answers if answer.status != 200
    )


def describe(answers: Sequence[Answer]) -> str:
    """Return what the calls got, and how long they waited."""
    waits = sorted(answer.at - answer.sent_at for answer in answers if answer.status == 200)
    failures = count_failures(answers)
    return (
        f"{len(answers)} calls, {len(waits)} answered, the slowest after {waits[-1]:.2f} s,"
        f" failures {dict(failures)}"
    )


@pytest.fixture(params=_LIMITS)
def place(request: pytest.FixtureRequest) -> str:
    """Return where the new versions are loaded: beside the old ones, or in their place."""
    return request.param


@pytest.fixture
def adapter(place: str, tmp_path: Path) -> Iterator[RunningAdapter]:
    """An adapter in front of a store, in whose limit one version fits, or two."""
    (tmp_path / "store").mkdir()
    flags = (
        f"--model-store={tmp_path / 'store'}",
        f"--cache-dir={tmp_path / 'cache'}",
        f"--model-roots={tmp_path}",
        "--revalidate-seconds=1",
        "--load-wait-seconds=30",
        "--memory-source=host",
        f"--memory-limit={_LIMITS[place]}",
        "--memory-reserve=0",
        COMPLETE,
    )
    with embedded_adapter(*flags) as adapter:
        yield adapter


@pytest.fixture(params=["store", "v2"])
def door(request: pytest.FixtureRequest, adapter: RunningAdapter, tmp_path: Path) -> Door:
    """Return the way to deploy versions."""
    if request.param == "v2":
        return V2Door(adapter, tmp_path / "code")
    return StoreDoor(adapter, Store(tmp_path / "store"))


async def update(door: Door, number: int, *, is_good: bool = True, **parts: str) -> None:
    await asyncio.to_thread(door.put, number, **parts)
    await asyncio.to_thread(door.wait_for_outcome, number, is_good=is_good)
    await asyncio.sleep(_QUIET_SECONDS)


def is_refused_for_crowd(answer: Answer) -> bool:
    """Return whether the call did not wait, because as many calls waited as may."""
    return answer.status == 503 and "callers wait for model" in answer.text


async def play(door: Door, act: Callable[[], AsyncIterator[int]]) -> tuple[Traffic, list[int]]:
    """Send calls while `act` updates the model. Return them, and the versions in order."""
    door.put(1)
    if isinstance(door, V2Door):
        door.wait_for_outcome(1, is_good=True)
    traffic = door.calls()
    deployed = [1]
    async with aiohttp.ClientSession() as session:
        reply = await session.post(traffic.url, json=infer_body(0.0), headers=traffic.headers)
        assert reply.status == 200, await reply.text()
    async with traffic.run():
        await asyncio.sleep(_QUIET_SECONDS)
        async for number in act():
            deployed.append(number)  # noqa: PERF401 - `act` works between two of them
    return traffic, deployed


def check(traffic: Traffic, deployed: Sequence[int], *, is_in_place: bool, name: str) -> None:
    """Check that no call failed that may not, and that the version never went back."""
    print(f"{name}: {describe(traffic.answers)}")  # noqa: T201
    failed = [answer for answer in traffic.answers if answer.status != 200]
    if is_in_place:
        failed = [answer for answer in failed if not is_refused_for_crowd(answer)]
    assert count_failures(failed) == {}
    assert find_older(traffic.answers, deployed) == []
    last = max(traffic.answers, key=lambda answer: answer.sent_at)
    assert last.version == deployed[-1]


async def test_good_updates_and_a_rollback_fail_no_call(door: Door, place: str) -> None:
    async def act() -> AsyncIterator[int]:
        for number in (2, 3, 2):
            yield number
            await update(door, number)

    traffic, deployed = await play(door, act)
    name = f"{type(door).__name__}, {place}, 1, 2, 3, 2"
    check(traffic, deployed, is_in_place=place == "in place", name=name)


@pytest.mark.parametrize("failure", _FAILURES)
async def test_failed_update_fails_no_call(door: Door, place: str, failure: str) -> None:
    async def act() -> AsyncIterator[int]:
        await update(door, 7, is_good=False, **_FAILURES[failure])
        yield 2
        await update(door, 2)

    traffic, deployed = await play(door, act)
    # what runs out of memory beside the old version is tried once more in its place
    is_in_place = place == "in place" or failure == "memory"
    name = f"{type(door).__name__}, {place}, fails by {failure}"
    check(traffic, deployed, is_in_place=is_in_place, name=name)
