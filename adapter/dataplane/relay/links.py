"""What all connections of the door share, and the connections that one caller's goes on to."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from adapter.dataplane.relay.headers import HeaderReader, Meanings
from adapter.dataplane.relay.peer import Owner, Peer
from adapter.dataplane.relay.ports import Answer, Call, Gate, read_answer, read_call

_HEADER_BYTES = 4 * 2**20  # texts of Triton's errors may be long

Connect = Callable[[Peer], Coroutine[Any, Any, None]]


class Site:
    """What all connections of a door share. `connect_*` raise OSError."""

    def __init__(
        self,
        gate: Gate,
        connect_triton: Connect,
        connect_server: Connect,
        *,
        timeout_seconds: float,
        max_message_bytes: int,
    ) -> None:
        self.gate = gate
        self.connect_triton = connect_triton
        self.connect_server = connect_server
        self.timeout_seconds = timeout_seconds
        self.max_message_bytes = max_message_bytes
        self.calls: Meanings[Call] = Meanings(partial(read_call, gate))
        self.answers: Meanings[Answer] = Meanings(read_answer)
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class Links:
    """To Triton, and to the server beside us: one each, made anew when it has gone."""

    def __init__(self, site: Site, owner: Owner) -> None:
        self._site = site
        self._owner = owner
        self._triton: Peer | None = None
        self._server: Peer | None = None
        self._all: list[Peer] = []

    def triton(self) -> Peer:
        if self._triton is None:
            self._triton = self._connected(self._site.connect_triton)
        return self._triton

    def server(self) -> Peer:
        if self._server is None:
            self._server = self._connected(self._site.connect_server)
        return self._server

    def _connected(self, connect: Connect) -> Peer:
        reader = HeaderReader(self._site.answers, _HEADER_BYTES)
        peer = Peer(self._owner, reader, is_server=False, max_header_bytes=_HEADER_BYTES)
        self._all.append(peer)
        self._site.begin(self._connect(peer, connect))
        return peer

    async def _connect(self, peer: Peer, connect: Connect) -> None:
        try:
            await connect(peer)
        except OSError:
            peer.close()
            self._owner.flush()

    def leave(self, peer: Peer) -> None:
        """Nothing new goes there."""
        if peer is self._triton:
            self._triton = None
        elif peer is self._server:
            self._server = None

    def gone(self, peer: Peer) -> None:
        self.leave(peer)
        if peer in self._all:
            self._all.remove(peer)

    def tidy(self) -> None:
        """Close what was left, once it has served what it had."""
        for peer in self._all:
            if peer not in {self._triton, self._server} and not peer.sender.streams:
                asyncio.get_running_loop().call_soon(peer.close)

    def flush(self) -> None:
        for peer in self._all:
            peer.sender.flush()

    def new_second(self) -> None:
        for peer in self._all:
            peer.chores = 0

    def close(self) -> None:
        for peer in list(self._all):
            peer.close()
