"""A TCP relay that loses connections on purpose, at a byte or at once, as networks do."""

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

NEVER = float("inf")
RESET, CLOSE, HALF = "reset", "close", "half"
KINDS = (RESET, CLOSE, HALF)


@dataclass
class Cut:
    """From when to when, monotonic seconds; it ends when both sides have lost the connection."""

    kind: str
    began: float
    ended: float = NEVER


class Side(asyncio.Protocol):
    """One of the two connections that make a relayed one. Bytes go to `other`."""

    def __init__(self, pair: "Pair") -> None:
        self.pair = pair
        self.other: Side
        self.transport: asyncio.Transport
        self.is_mute = False  # what is sent to it is lost: its half is closed
        self.left: int | None = None  # bytes of it that still pass before the cut

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=2**16)
        if self is self.pair.near:
            transport.pause_reading()  # until there is where to send it
        else:
            self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.left is None or len(data) < self.left:
            self.left = None if self.left is None else self.left - len(data)
            self.other.write(data)
        else:
            self.other.write(data[: self.left])
            self.pair.cut(self)

    def write(self, data: bytes) -> None:
        if not self.is_mute and not self.transport.is_closing():
            self.transport.write(data)

    def eof_received(self) -> bool:
        self.other.end_half()
        return not self.is_mute

    def end_half(self) -> None:
        if not self.is_mute and not self.transport.is_closing():
            self.is_mute = True
            self.transport.write_eof()

    def connection_lost(self, error: Exception | None) -> None:
        if not hasattr(self.other, "transport"):
            pass
        elif error is None:
            self.other.transport.close()
        else:
            self.other.reset()
        self.pair.lost(self)

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def reset(self) -> None:
        if not self.transport.is_closing():
            linger = struct.pack("ii", 1, 0)
            own = self.transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()


class Pair:
    def __init__(self, relay: "Relay") -> None:
        self.relay = relay
        self.near, self.far = Side(self), Side(self)
        self.near.other, self.far.other = self.far, self.near
        self.kind = RESET
        self.done: Cut | None = None
        self._open = {self.near, self.far}

    @property
    def is_lost(self) -> bool:
        return not self._open

    def arm(self, kind: str, *, is_near: bool, after: int) -> None:
        """Cut where so many bytes from the near or the far side have passed; 0: now."""
        self.kind = kind
        side = self.near if is_near else self.far
        if after:
            side.left = after
        else:
            self.cut(side)

    def disarm(self) -> None:
        self.near.left = self.far.left = None

    def cut(self, side: Side) -> None:
        self.disarm()
        if self.done is not None:
            return
        self.done = Cut(self.kind, time.monotonic())
        self.relay.cuts.append(self.done)
        if self.kind == HALF:
            side.other.end_half()
            return
        for one in (self.near, self.far):
            if self.kind == RESET:
                one.reset()
            else:
                one.transport.close()

    def lost(self, side: Side) -> None:
        self._open.discard(side)
        if self.is_lost:
            self.relay.pairs.discard(self)
            if self.done is not None:
                self.done.ended = time.monotonic()


class Relay:
    """Listens at `address`, and goes on to `target`; both are host:port."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self.pairs: set[Pair] = set()
        self.cuts: list[Cut] = []
        self._joining: set[asyncio.Task[None]] = set()

    async def _serve(self, own: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        host, port = self.target.rsplit(":", 1)
        pair = Pair(self)
        await loop.connect_accepted_socket(lambda: pair.near, own)
        try:
            await loop.create_connection(lambda: pair.far, host, int(port))
        except OSError:
            pair.near.transport.abort()
            return
        if not pair.is_lost:
            self.pairs.add(pair)

    async def listen(self, own: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted, _ = await loop.sock_accept(own)
            accepted.settimeout(0)
            task = asyncio.create_task(self._serve(accepted))
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)

    def was_cut(self, since: float, slack: float = 0) -> bool:
        """Any of its connections, between then and now."""
        return any(cut.ended + slack >= since for cut in self.cuts)


@asynccontextmanager
async def relay_to(target: str) -> AsyncIterator[Relay]:
    relay = Relay(target)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as own:
        own.settimeout(0)
        relay.address = f"127.0.0.1:{own.getsockname()[1]}"
        listening = asyncio.create_task(relay.listen(own))
        try:
            yield relay
        finally:
            listening.cancel()
            await asyncio.wait([listening, *relay._joining])
            for pair in list(relay.pairs):
                for side in (pair.near, pair.far):
                    side.transport.abort()
