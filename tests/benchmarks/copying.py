"""A proxy that only copies bytes, on the adapter's event loop: what no proxy in Python goes below.

`python -m tests.benchmarks.copying HOST:PORT` listens on a free port and prints it; it ends with
its standard input.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import uvloop

from tests.benchmarks.place import Side


class _Connection(asyncio.Protocol):
    """Passes what it receives on to another connection. Keeps it until there is one."""

    def __init__(self) -> None:
        self.other: asyncio.Transport | None = None
        self.early: list[bytes] = []
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        else:
            self.other.write(data)

    def connection_lost(self, _: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


class _Caller(_Connection):
    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._to = host, port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, server = await loop.create_connection(_Connection, *self._to)
        for one, its in ((self, server.transport), (server, self.transport)):
            one.other = its
            if not its.is_closing():
                its.writelines(one.early)


async def _serve(host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Caller(host, port), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def run_copying(address: str) -> Iterator[Side]:
    """Run the proxy in front of `address`."""
    command = (sys.executable, "-m", "tests.benchmarks.copying", address)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            yield Side(f"127.0.0.1:{port}", process.pid)
        finally:
            process.stdin.close()
            process.wait(10)


if __name__ == "__main__":
    at, _, number = sys.argv[1].rpartition(":")
    uvloop.run(_serve(at, int(number)))
