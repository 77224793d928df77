"""Callers of both gRPC listeners who cancel, run out of time and close their connections.

Triton 2.51 dies of calls that are cancelled while it works on them. It has to live through this,
the callers that go on get the right answers, and nothing is left behind.
"""

import asyncio
import random
import sys
import threading
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.frontends.listeners import Listeners
from adapter.settings import parse_address
from tests.grpc_calls import NO_LIMITS, SERVICE
from tests.journeys.memory.models import metric
from tests.running import RunningAdapter, embedded_adapter, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

CHANNELS, CALLERS = 4, 12
LARGEST = 300_000  # values of four bytes
PATIENCE_SECONDS = 20
LISTENERS = ("grpc", "grpc_data")
EXPECTED = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
}
MODEL = "identity"
# what grpc raises where a stream has ended under its user's hands
GRPC_ENDS = (
    asyncio.CancelledError,
    asyncio.InvalidStateError,
    grpc.aio.AioRpcError,
    grpc.aio.InternalError,
    grpc.aio.UsageError,
)


@dataclass
class Books:
    """What the callers saw. `ends`: of calls that were left to end, by status."""

    chance: random.Random
    ends: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def values(self) -> np.ndarray:
        size = round(LARGEST ** self.chance.random())
        return np.arange(size, dtype=np.float32) + np.float32(self.chance.randrange(1 << 20))

    def check(self, asked: np.ndarray, answer: pb.ModelInferResponse) -> None:
        if answer.raw_output_contents[0] != asked.tobytes():
            self.wrong.append(f"{len(asked)} values came back as others")

    def share_answered(self) -> float:
        return self.ends["OK"] / self.ends.total()


class Shared:
    """One connection of several callers; `closings` counts how often it was closed on them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.closings = 0
        self._open()

    def _open(self) -> None:
        options = [*NO_LIMITS, ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(self.address, options=options)
        self.infer = self.channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelInferResponse.FromString,
        )
        self.stream = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )

    async def close(self) -> None:
        self.closings += 1
        channel = self.channel
        self._open()
        await channel.close(None)


def request_of(values: np.ndarray) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        model_name=MODEL,
        inputs=[{"name": "IN", "datatype": "FP32", "shape": [len(values)]}],
        raw_input_contents=[values.tobytes()],
    )


class Caller:
    def __init__(self, books: Books, shared: Shared) -> None:
        self.books = books
        self.shared = shared

    async def call(self) -> None:
        books, chance = self.books, self.books.chance
        kind = chance.choices(("plain", "cancel", "deadline", "close"), (60, 18, 18, 0.5))[0]
        books.done[kind] += 1
        if kind == "close":
            await self.shared.close()
            return
        values, closings = books.values(), self.shared.closings
        seconds = chance.choice((0.005, 0.05)) if kind == "deadline" else PATIENCE_SECONDS
        call = self.shared.infer(request_of(values), timeout=seconds)
        if kind == "cancel":
            await asyncio.sleep(chance.random() * 0.02)
            call.cancel()
        code = await self._end(call, values)
        if kind == "plain" and closings == self.shared.closings:
            books.ends[code.name] += 1

    async def _end(self, call, values: np.ndarray) -> grpc.StatusCode:
        try:
            self.books.check(values, await call)
        except grpc.aio.AioRpcError as error:
            if error.code() not in EXPECTED:
                self.books.wrong.append(f"{error.code().name}: {error.details()}")
            return error.code()
        except (asyncio.CancelledError, grpc.aio.UsageError):  # its channel was closed
            return grpc.StatusCode.CANCELLED
        return grpc.StatusCode.OK

    async def converse(self) -> None:
        """A stream of some messages that goes to its end, is cancelled, or runs out of time."""
        books, chance = self.books, self.books.chance
        kind = chance.choices(("plain", "cancel", "deadline"), (50, 30, 20))[0]
        books.done[kind] += 1
        seconds = chance.choice((0.005, 0.05)) if kind == "deadline" else PATIENCE_SECONDS
        call = self.shared.stream(timeout=seconds)
        asked = [books.values() for _ in range(chance.randint(1, 4))]
        if kind == "cancel":
            asyncio.get_running_loop().call_later(chance.random() * 0.03, call.cancel)
        with suppress(*GRPC_ENDS):
            for values in asked:
                await call.write(request_of(values))
            await call.done_writing()
            for values in asked:
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    break
                if answer.error_message:
                    books.wrong.append(answer.error_message)
                books.check(values, answer.infer_response)
        code = await call.code()
        if kind == "plain":
            books.ends[code.name] += 1


async def storm(address: str, books: Books, seconds: float, act: str) -> None:
    shared = [Shared(address) for _ in range(CHANNELS)]
    callers = [Caller(books, shared[i % CHANNELS]) for i in range(CALLERS)]
    end = asyncio.get_running_loop().time() + seconds

    async def go_on(caller: Caller) -> None:
        while asyncio.get_running_loop().time() < end and len(books.wrong) < 10:
            try:
                async with asyncio.timeout(2 * PATIENCE_SECONDS):
                    await getattr(caller, act)()
            except TimeoutError:
                books.wrong.append("a call has no end")

    async with asyncio.TaskGroup() as group:
        for caller in callers:
            group.create_task(go_on(caller))
    for one in shared:
        await one.channel.close(None)


def check_rest(adapter: RunningAdapter) -> None:
    """Nothing is held, abandoned or in flight, of any listener."""

    def at_rest() -> bool:
        return [model["in_flight"] for model in adapter.state()["models"]] == [0]

    wait_until(at_rest, 60, "no request holds the model")
    lines = [f'triton_adapter_requests_in_flight{{frontend="{one}"}}' for one in LISTENERS]
    for line in ("triton_adapter_abandoned_requests", *lines):
        wait_until(lambda line=line: metric(adapter, line) == 0, 10, f"{line} is 0")


def play(listener: str, act: str, seconds: float, seed: int, root) -> None:
    with embedded_adapter(f"--model-roots={root}", "--grpc-data=127.0.0.1:0") as adapter:
        with closing(adapter.client()) as client:
            assert client.load(MODEL, write_python_model(root / MODEL)).status == 200
        books = Books(random.Random(seed))
        asyncio.run(storm(adapter.listeners[listener], books, seconds, act))
        told = f"{listener} {act}: {dict(books.done)}, left to end: {dict(books.ends)}"
        sys.stdout.write(f"{told}\n")
        ends = adapter.events("triton.exited") + adapter.events("triton.unreachable")
        assert not ends, f"{told}; {ends}"
        assert not books.wrong, f"{told}; {books.wrong}"
        assert books.share_answered() >= 0.95, told
        check_rest(adapter)


@pytest.mark.parametrize("listener", LISTENERS)
def test_triton_survives_callers_who_leave(listener, seconds, seed, tmp_path):
    play(listener, "call", seconds / 4, seed, tmp_path)


@pytest.mark.parametrize("listener", LISTENERS)
def test_triton_lives_and_answers_though_streams_are_cancelled(listener, seconds, seed, tmp_path):
    play(listener, "converse", seconds / 4, seed, tmp_path)


class NoRelay:
    """Leaves the fallback server to be called directly."""

    async def listen(self, host: str, port: int, path: str | None) -> int:
        return 0

    async def close(self, grace_seconds: float) -> None: ...

    def fallback_began(self) -> None: ...


async def test_calls_are_answered_after_half_a_minute_unbegun():
    """See that gRPC does not cancel them, as it does by default after 30 s."""
    halt = threading.Event()
    halts = iter((31.0,))

    async def act(message: bytes, _: object) -> bytes:
        halt.wait(next(halts, 0.0))  # the event loop stands still, while the other calls arrive
        return message

    method = grpc.unary_unary_rpc_method_handler(act)
    service = grpc.method_handlers_generic_handler("test.Service", {"Halt": method})
    addresses: list[str] = []

    def make(address: str) -> NoRelay:
        addresses.append(address)
        return NoRelay()

    listeners = Listeners(grace_seconds=1, max_message_bytes=1000)
    await listeners.open_grpc("grpc", parse_address("127.0.0.1:0"), [service], make)
    async with grpc.aio.insecure_channel(addresses[0]) as channel:
        call = channel.unary_unary("/test.Service/Halt")
        answers = await asyncio.gather(*(call(b"x", timeout=90) for _ in range(20)))
    await listeners.close()
    assert set(answers) == {b"x"}
