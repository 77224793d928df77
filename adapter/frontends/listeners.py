"""The doors that are open: servers of both protocols, each at its address."""

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
from adapter.settings import Door, flag_of, variable_of

log = logging.getLogger(__name__)

# Adds itself to a server that has not been started.
GrpcService: TypeAlias = Callable[[grpc.aio.Server], None]

_GRPC_OPTIONS = (
    # a mesh sends the headers of its own callers along
    ("grpc.max_metadata_size", 64 * 2**10),
    ("grpc.absolute_max_metadata_size", 2**20),
)


_FOLDERS, _SOCKET = "triton-adapter-lane-", "s"


class Lane(Protocol):
    async def listen(self, host: str | None, port: int, path: str | None) -> int: ...
    async def close(self, grace_seconds: float) -> None: ...


class Doors:
    """`addresses`: where each open door really is, port 0 resolved.

    `grace_seconds`: how long requests in flight may go on when the doors close.
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
        self._patience = grace_seconds
        self._probes: list[web.AppRunner] = []
        self._http: list[HttpListener] = []
        self._lanes: list[Lane] = []
        self._beside: list[grpc.aio.Server] = []  # each serves a lane
        self._folders: list[tempfile.TemporaryDirectory[str]] = []

    async def open_probes(self, name: str, door: Door, application: web.Application) -> None:
        if door.kind == "off":
            return
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=self._patience)
        await runner.setup()
        self._probes.append(runner)
        with _naming(name, door):
            if door.kind == "unix":
                await web.UnixSite(runner, door.path).start()
            else:
                await web.TCPSite(runner, door.host, door.port).start()
        self._opened(name, door, 0 if door.kind == "unix" else runner.addresses[0][1])

    async def open_http(self, name: str, door: Door, listener: HttpListener) -> None:
        if door.kind == "off":
            return
        with _naming(name, door):
            port = await listener.open(door)
        self._http.append(listener)
        self._opened(name, door, port)

    async def open_grpc(
        self, name: str, door: Door, services: Iterable[GrpcService], make: Callable[[str], Lane]
    ) -> None:
        """`make` gets the address of a server of our own, for what does not go straight."""
        if door.kind == "off":
            return
        await REPOSITORY.run(_sweep)
        folder = tempfile.TemporaryDirectory(prefix=_FOLDERS)
        self._folders.append(folder)
        inner = self._make_server(services)
        address = f"unix:{folder.name}/{_SOCKET}"
        inner.add_insecure_port(address)
        await inner.start()
        self._beside.append(inner)
        lane = make(address)
        with _naming(name, door):
            path = door.path if door.kind == "unix" else None
            port = await lane.listen(door.host, door.port, path)
        self._lanes.append(lane)
        self._opened(name, door, port)

    def _make_server(self, services: Iterable[GrpcService]) -> grpc.aio.Server:
        limits = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
        options = [*_GRPC_OPTIONS, *((limit, self._max_message_bytes) for limit in limits)]
        server = grpc.aio.server(options=options, interceptors=self._interceptors)
        for add_to in services:
            add_to(server)
        return server

    async def close(self) -> None:
        """Take nothing new but probes; what is in flight has its time to end."""
        await asyncio.gather(
            *(lane.close(self._patience) for lane in self._http),
            *(lane.close(self._patience) for lane in self._lanes),
        )
        for server in self._beside:  # what its lane had has ended
            await server.stop(None)
        for folder in self._folders:
            folder.cleanup()

    async def close_probes(self) -> None:
        await asyncio.gather(*(runner.cleanup() for runner in self._probes))

    def _opened(self, name: str, door: Door, port: int) -> None:
        address = str(Door("tcp", door.host, port) if door.kind == "tcp" else door)
        self.addresses[name] = address
        log.info("adapter.listening", extra={"door": name, "address": address})


@contextmanager
def _naming(name: str, door: Door) -> Iterator[None]:
    """OSError with the listener and its setting, for an address that is not to be had."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # grpc raises RuntimeError
        setting = f"setting {name}, {flag_of(name)}, {variable_of(name)}"
        raise OSError(f"{name} cannot listen at {door} ({setting}): {error}") from error


def _sweep() -> None:
    """Remove the folders of killed adapters of the same user: nobody listens at their sockets."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if folder.lstat().st_uid != os.getuid() or not (folder / _SOCKET).is_socket():
                continue  # one without a socket may be about to get it
            try:
                probe.connect(str(folder / _SOCKET))
            except ConnectionRefusedError:
                shutil.rmtree(folder)
