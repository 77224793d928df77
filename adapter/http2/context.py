"""What the connections of one listener share, and how upstreams are connected."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from adapter.http2.headers import HeaderBlockCache
from adapter.http2.policy import Answer, Call, RoutingPolicy, read_answer, read_call
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.turns import Turns

_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 60, 20, 3

Connect = Callable[[asyncio.Protocol], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """Time limits of clients, in seconds. After `slow` a request must arrive at `rate` bytes a
    second on average. Part of a response must be read every `answer`; when its model is unloaded
    or the adapter stops, all of it at `rate`, after `hurry`.
    """

    slow: float = 10
    rate: float = 64 * 2**10
    answer: float = 60
    hurry: float = 2


class ProxyContext:
    """`connect_*` raise OSError. `on_shed` is told what was turned away: a connection as one too
    many (`refused`) or for a flood of frames (`flood`), or a request beyond the streams of its
    connection (`streams`). `is_stopping`: clients get little more time.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        connect_triton: Connect,
        connect_fallback: Connect,
        *,
        timeout_seconds: float,
        max_message_bytes: int,
        budget: ByteBudget,
        on_shed: Callable[[str], None] = lambda _: None,
        turns: Turns | None = None,
    ) -> None:
        self.policy = policy
        self.connect_triton = connect_triton
        self.connect_fallback = connect_fallback
        self.timeout_seconds = timeout_seconds
        self.max_message_bytes = max_message_bytes
        self.budget = budget
        self.on_shed = on_shed
        self.turns = turns or Turns()
        self.caller_limits = CallerLimits()
        self.is_stopping = False
        self.calls: HeaderBlockCache[Call] = HeaderBlockCache(partial(read_call, policy))
        self.answers: HeaderBlockCache[Answer] = HeaderBlockCache(read_answer)
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


def connect_to(address: Callable[[], str | None]) -> Connect:
    """Connect to `host:port` or `unix:/path`; OSError where nobody listens, or it is None yet."""

    async def connect(protocol: asyncio.Protocol) -> None:
        found = address()
        if found is None:
            raise ConnectionRefusedError("not up yet")
        loop = asyncio.get_running_loop()
        if found.startswith("unix:"):
            await loop.create_unix_connection(lambda: protocol, found.removeprefix("unix:"))
        else:
            host, _, port = found.rpartition(":")
            made, _ = await loop.create_connection(lambda: protocol, host.strip("[]"), int(port))
            _keep_alive(made)

    return connect


def _keep_alive(transport: asyncio.Transport) -> None:
    """Notice a host that is gone, which would keep its requests waiting for ever."""
    own = transport.get_extra_info("socket")
    if own is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
