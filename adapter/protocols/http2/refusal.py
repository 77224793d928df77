"""What a connection gets that is one too many."""

import asyncio
from typing import cast


class Refusal(asyncio.Protocol):
    """Closes before a word is said. To a gRPC client that is a connection which failed: its calls
    are UNAVAILABLE, and it tries again ever more slowly. With SETTINGS and GOAWAY it would come
    again at once, and its calls would wait for their deadline.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).close()
