"""Closes connections beyond the limit."""

import asyncio
from typing import cast


class Refusal(asyncio.Protocol):
    """Closes without sending anything. A gRPC client takes that for a failed connection: its calls
    are UNAVAILABLE, and it backs off. After SETTINGS and GOAWAY it would reconnect at once, and
    its calls would wait for their deadline.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).close()
