"""What all connections of the door share."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from adapter.dataplane.relay.headers import Meanings
from adapter.dataplane.relay.ports import Answer, Call, Gate, read_answer, read_call

Connect = Callable[[asyncio.Protocol], Coroutine[Any, Any, None]]


class Site:
    """`connect_*` raise OSError."""

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


def connect_to(address: Callable[[], str | None]) -> Connect:
    """`host:port` or `unix:/path`, None while there is none; OSError when nobody is there."""

    async def connect(protocol: asyncio.Protocol) -> None:
        found = address()
        if found is None:
            raise ConnectionRefusedError("not up yet")
        loop = asyncio.get_running_loop()
        if found.startswith("unix:"):
            await loop.create_unix_connection(lambda: protocol, found.removeprefix("unix:"))
        else:
            host, _, port = found.rpartition(":")
            await loop.create_connection(lambda: protocol, host.strip("[]"), int(port))

    return connect
