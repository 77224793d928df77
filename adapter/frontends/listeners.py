"""Opens and closes the listeners of both protocols, each at its address."""

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeAlias

import grpc
from aiohttp import web

from adapter.frontends.http.server import HttpListener
from adapter.runtime.threads import REPOSITORY
from adapter.settings import Address, flag_of, variable_of

log = logging.getLogger(__name__)

# adds a service to a server that has not been started
GrpcService: TypeAlias = Callable[[grpc.aio.Server], None]

_GRPC_OPTIONS = (
    # ModelMesh forwards the headers of its own clients
    ("grpc.max_metadata_size", 64 * 2**10),
    ("grpc.absolute_max_metadata_size", 2**20),
)
_FOLDERS, _SOCKET = "triton-adapter-lane-", "s"


class Listener(Protocol):
    async def listen(self, host: str | None, port: int, path: str | None) -> int: ...
    async def close(self, grace_seconds: float) -> None: ...


class Listeners:
    """`addresses` are those of open listeners, with port 0 resolved. When they close, requests in
    flight have `grace_seconds` to end.
    """

    def __init__(
        self,
        grace_seconds: float,
        max_message_bytes: int,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self.addresses: dict[str, str] = {}
        self._max_message_bytes = max_message_bytes
        self._interceptors = interceptors
        self._grace_seconds = grace_seconds
        self._probes: list[web.AppRunner] = []
        self._http: list[HttpListener] = []
        self._grpc: list[Listener] = []
        self._fallbacks: list[grpc.aio.Server] = []  # each behind a listener
        self._folders: list[tempfile.TemporaryDirectory[str]] = []

    async def open_probes(self, name: str, address: Address, application: web.Application) -> None:
        if address.kind == "off":
            return
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=self._grace_seconds)
        await runner.setup()
        self._probes.append(runner)
        with _naming(name, address):
            if address.kind == "unix":
                await web.UnixSite(runner, address.path).start()
            else:
                await web.TCPSite(runner, address.host, address.port).start()
        self._opened(name, address, 0 if address.kind == "unix" else runner.addresses[0][1])

    async def open_http(self, name: str, address: Address, listener: HttpListener) -> None:
        if address.kind == "off":
            return
        with _naming(name, address):
            port = await listener.open(address)
        self._http.append(listener)
        self._opened(name, address, port)

    async def open_grpc(
        self,
        name: str,
        address: Address,
        services: Iterable[GrpcService],
        make: Callable[[str], Listener],
    ) -> None:
        """`make` gets the address of the server for what does not go to Triton directly."""
        if address.kind == "off":
            return
        await REPOSITORY.run(_sweep)
        folder = tempfile.TemporaryDirectory(prefix=_FOLDERS)
        self._folders.append(folder)
        fallback = self._make_server(services)
        fallback_address = f"unix:{folder.name}/{_SOCKET}"
        fallback.add_insecure_port(fallback_address)
        await fallback.start()
        self._fallbacks.append(fallback)
        listener = make(fallback_address)
        with _naming(name, address):
            path = address.path if address.kind == "unix" else None
            port = await listener.listen(address.host, address.port, path)
        self._grpc.append(listener)
        self._opened(name, address, port)

    def _make_server(self, services: Iterable[GrpcService]) -> grpc.aio.Server:
        limits = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
        options = [*_GRPC_OPTIONS, *((limit, self._max_message_bytes) for limit in limits)]
        server = grpc.aio.server(options=options, interceptors=self._interceptors)
        for add_to in services:
            add_to(server)
        return server

    async def close(self) -> None:
        """Close all listeners but the probes'; requests in flight have the grace period to end."""
        await asyncio.gather(
            *(listener.close(self._grace_seconds) for listener in self._http),
            *(listener.close(self._grace_seconds) for listener in self._grpc),
        )
        for server in self._fallbacks:  # its listener's requests have ended
            await server.stop(None)
        for folder in self._folders:
            folder.cleanup()

    async def close_probes(self) -> None:
        await asyncio.gather(*(runner.cleanup() for runner in self._probes))

    def _opened(self, name: str, address: Address, port: int) -> None:
        real = str(Address("tcp", address.host, port) if address.kind == "tcp" else address)
        self.addresses[name] = real
        log.info("adapter.listening", extra={"door": name, "address": real})


@contextmanager
def _naming(name: str, address: Address) -> Iterator[None]:
    """Name the listener and its setting in the OSError of an address that is not available."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # grpc raises RuntimeError
        setting = f"setting {name}, {flag_of(name)}, {variable_of(name)}"
        raise OSError(f"{name} cannot listen at {address} ({setting}): {error}") from error


def _sweep() -> None:
    """Remove folders of killed adapters of this user: sockets that nobody listens at."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if folder.lstat().st_uid != os.getuid() or not (folder / _SOCKET).is_socket():
                continue  # its socket may be about to be created
            try:
                probe.connect(str(folder / _SOCKET))
            except ConnectionRefusedError:
                shutil.rmtree(folder)
