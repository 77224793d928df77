"""Probes whether Triton answers, over new connections: an old one could hide or fake it."""

import asyncio
import errno
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

# So long a Triton of its own may answer nothing: a GPU that starts, or a machine that swaps, holds
# it up for seconds, and a restart costs all models.
HANG_SECONDS = 30.0
_IN_A_ROW = 6
# A probe does not count if the event loop was late by more than this share of its time.
_LATE_SHARE = 0.2
_TICK_SECONDS = 0.05
_NO_ANSWER = {f"StatusCode.{name}" for name in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")}
_FRESH = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


class Server(Protocol):
    http_address: str
    grpc_address: str

    @property
    def up(self) -> object | None:
        """Return the run of the server that was found live; None while there is none."""

    async def restart(self, reason: str) -> None: ...


class HangDetector:
    """Restarts a Triton whose process lives but answers nothing.

    Triton hangs when consecutive probes, over `seconds` in all, had no answer over HTTP or gRPC,
    each made on time, while `answers`, the count of Triton's answers to others, stood still.
    """

    def __init__(
        self,
        server: Server,
        seconds: float,
        answers: Callable[[], int],
        lateness: Callable[[float], Coroutine[Any, Any, float]] | None = None,
    ) -> None:
        """Watch `server`. `lateness` waits for some seconds and returns how late the loop was."""
        self._server = server
        self._seconds = seconds
        self._answers = answers
        self._silent = 0
        self._lateness = lateness or _lateness

    async def poll(self) -> None:
        """Make one probe, and pause for the rest of its time."""
        seconds = self._seconds / _IN_A_ROW
        run, before = self._server.up, self._answers()
        clock = asyncio.create_task(self._lateness(seconds))
        try:
            answered = run is None or await answers(self._server, seconds)
            late = await clock
        finally:
            clock.cancel()
        is_silent = not answered and self._answers() == before and self._server.up is run
        self._silent = self._silent + 1 if is_silent and late <= seconds * _LATE_SHARE else 0
        if self._silent == _IN_A_ROW:
            self._silent = 0
            await self._server.restart(f"it has answered nothing for {self._seconds:g} s")


async def answers(server: Server, seconds: float) -> bool:
    """Return whether Triton gives any answer over HTTP or gRPC; True if that is unknown."""
    if await _result_of(is_live(server.http_address, any_answer=True), seconds / 2) is not False:
        return True
    return await _result_of(_answers_grpc(server.grpc_address), seconds / 2) is not False


async def _result_of(probe: Coroutine[Any, Any, bool | None], seconds: float) -> bool | None:
    try:
        async with asyncio.timeout(seconds):
            return await probe
    except TimeoutError:
        return False


async def _lateness(seconds: float) -> float:
    """Return by how much the event loop was late at worst within `seconds`."""
    loop = asyncio.get_running_loop()
    end, worst = loop.time() + seconds, 0.0
    while (now := loop.time()) < end:
        await asyncio.sleep(_TICK_SECONDS)
        worst = max(worst, loop.time() - now - _TICK_SECONDS)
    return worst


async def is_live(address: str, *, any_answer: bool = False) -> bool | None:
    """Return whether Triton's HTTP port reports live, or with `any_answer` answers at all. None if
    that is unknown for lack of descriptors.
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
    client = InferenceServerClient(address, channel_args=_FRESH)
    try:
        await client.is_server_live()
    except InferenceServerException as error:
        return error.status() not in _NO_ANSWER
    finally:
        await client.close()
    return True
