"""What several tests of the gRPC proxy are given."""

from collections.abc import AsyncIterator

import grpc
import pytest

from adapter.relay import listener, transport
from tests.fakes.http2_triton import ScriptedTriton, scripted_triton
from tests.frontends.grpc.proxy_listener import (
    ProxySetup,
    Wire,
    channel_to,
    echo,
    proxy_before,
    wire_to,
)


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a test is within one second of the proxy's, which so many frames may come in, and who
    is left with an error has the time to read it: a slow machine takes longer over a flood.
    """
    monkeypatch.setattr(listener, "_TICKS_A_SECOND", 10**9)
    monkeypatch.setattr(transport, "_ERROR_CLOSE_SECONDS", 60.0)


@pytest.fixture
async def proxy(request: pytest.FixtureRequest) -> AsyncIterator[ProxySetup]:
    """A proxy before a Triton that echoes; a test may give it other limits."""
    async with proxy_before(echo, **getattr(request, "param", {})) as proxy:
        yield proxy


@pytest.fixture
async def upstream(proxy: ProxySetup) -> AsyncIterator[ScriptedTriton]:
    """A scripted Triton in place of the one that echoes."""
    async with scripted_triton(proxy) as triton:
        yield triton


@pytest.fixture
async def wire(proxy: ProxySetup) -> AsyncIterator[Wire]:
    """A client of frames that has greeted."""
    async with wire_to(proxy.address) as wire:
        wire.greet()
        yield wire


@pytest.fixture
async def channel(proxy: ProxySetup) -> AsyncIterator[grpc.aio.Channel]:
    async with channel_to(proxy.address) as channel:
        yield channel
