"""What a connection sends to its caller, at the speed at which the caller takes it."""

import asyncio
import math

from adapter.frontends.http_lane.limits import Limits


class Outgoing(asyncio.Protocol):
    """`watcher` is told when writing pauses and resumes. `write_due`: of the event loop's clock,
    when a caller who takes nothing has had its time.
    """

    def __init__(self, limits: Limits) -> None:
        self.transport: asyncio.Transport
        self.watcher: asyncio.BaseProtocol | None = None
        self.is_full = False
        self.write_due = math.inf
        self._answer_seconds = limits.answer
        self._writer: asyncio.Future[None] | None = None

    def pause_writing(self) -> None:
        self.is_full = True
        self.write_due = asyncio.get_running_loop().time() + self._answer_seconds
        if self.watcher is not None:
            self.watcher.pause_writing()

    def resume_writing(self) -> None:
        self.is_full = False
        self.write_due = math.inf
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
        if self.watcher is not None:
            self.watcher.resume_writing()

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def say_continue(self) -> None:
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def drained(self) -> None:
        """Wait until the caller has taken most of what was written, or is gone."""
        while self.is_full:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
