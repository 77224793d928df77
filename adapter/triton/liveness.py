"""Probes whether Triton answers, over new connections: an old one could hide or fake it."""

import asyncio
import errno
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

# How long an embedded Triton may answer nothing: a GPU that starts, or a machine that swaps, holds
# Triton up for seconds, and a restart costs all models.
HANG_SECONDS = 30.0
_IN_A_ROW = 6
# A probe does not count if the event loop was late by more than this share of its time.
_LATE_SHARE = 0.2
_TICK_SECONDS = 0.05
_NO_ANSWER = {f"StatusCode.{name}" for name in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")}
_FRESH = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


class Server(Protocol):
    """The embedded Triton, as far as its liveness is concerned."""

    http_address: str
    grpc_address: str

    @property
    def up(self) -> object | None:
        """Return the run of the server that was found live; None while there is none."""

    async def restart(self, reason: str) -> None:
        """Kill the server, so that another is started."""


class HangDetector:
    """Restarts a Triton whose process lives but answers nothing.

    Triton hangs when consecutive probes, each made on time, had no answer over HTTP or gRPC for the
    whole limit, and Triton answered nobody else meanwhile.
    """

    def __init__(
        self,
        server: Server,
        seconds: float,  # the limit, over all probes in a row
        count_answers: Callable[[], int],  # Triton's answers to others, so far
        # waits for some seconds, and returns how late the event loop was
        measure_lateness: Callable[[float], Coroutine[Any, Any, float]] | None = None,
    ) -> None:
        self._server = server
        self._seconds = seconds
        self._count_answers = count_answers
        self._silent_probes = 0
        self._measure_lateness = measure_lateness or _measure_lateness

    async def poll(self) -> None:
        """Make one probe, and pause for the rest of its time."""
        seconds = self._seconds / _IN_A_ROW
        run = self._server.up
        count_before = self._count_answers()
        measuring = asyncio.create_task(self._measure_lateness(seconds))
        try:
            has_answered = run is None or await answers(self._server, seconds)
            late_seconds = await measuring
        finally:
            measuring.cancel()
        has_answered |= self._count_answers() != count_before
        is_on_time = late_seconds <= seconds * _LATE_SHARE
        is_silent = not has_answered and is_on_time and self._server.up is run
        self._silent_probes = self._silent_probes + 1 if is_silent else 0
        if self._silent_probes == _IN_A_ROW:
            self._silent_probes = 0
            await self._server.restart(f"it has answered nothing for {self._seconds:g} s")


async def answers(server: Server, seconds: float) -> bool:
    """Return whether Triton gives any answer over HTTP or gRPC; True if that is unknown."""
    if await _limit(is_live(server.http_address, any_answer=True), seconds / 2) is not False:
        return True
    return await _limit(_answers_grpc(server.grpc_address), seconds / 2) is not False


async def _limit(probe: Coroutine[Any, Any, bool | None], seconds: float) -> bool | None:
    """Return the result of a probe, and False if it takes longer than this."""
    try:
        async with asyncio.timeout(seconds):
            return await probe
    except TimeoutError:
        return False


async def _measure_lateness(seconds: float) -> float:
    """Return by how many seconds the event loop was late at worst within `seconds`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    worst_seconds = 0.0
    while (now := loop.time()) < deadline:
        await asyncio.sleep(_TICK_SECONDS)
        worst_seconds = max(worst_seconds, loop.time() - now - _TICK_SECONDS)
    return worst_seconds


async def is_live(address: str, *, any_answer: bool = False) -> bool | None:
    """Return whether Triton's HTTP port reports live, or with `any_answer` answers at all.

    The result is None if that is unknown, for lack of descriptors.
    """
    host, _, port = address.rpartition(":")
    request = f"GET /v2/health/live HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request.encode())
            status = await reader.readline()
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    except OSError as error:
        return None if error.errno in {errno.EMFILE, errno.ENFILE} else False
    return bool(status) if any_answer else status.startswith(b"HTTP/1.1 200 ")


async def _answers_grpc(address: str) -> bool:
    """Return whether Triton gives any answer over gRPC, also an error."""
    client = InferenceServerClient(address, channel_args=_FRESH)
    try:
        await client.is_server_live()
    except InferenceServerException as error:
        return error.status() not in _NO_ANSWER
    finally:
        await client.close()
    return True
