"""Opens and closes the listeners of both protocols, each at its address."""

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import grpc
from aiohttp import web

from adapter.runtime import sockets
from adapter.runtime.threads import REPOSITORY
from adapter.settings import Address, flag_of, variable_of

log = logging.getLogger(__name__)

_GRPC_OPTIONS = (
    # ModelMesh forwards the headers of its own clients
    ("grpc.max_metadata_size", 64 * 2**10),
    ("grpc.absolute_max_metadata_size", 2**20),
    # By default gRPC cancels calls of any connection at random while 1,000 to 3,000 have not begun.
    # The relay bounds connections, and the streams of each.
    ("grpc.server.max_pending_requests", 2**31 - 1),
    ("grpc.server.max_pending_requests_hard_limit", 2**31 - 1),
    # By default gRPC cancels calls that have not begun within 30 s, which happens when this process
    # has too little CPU. Clients have deadlines of their own.
    ("grpc.server_max_unrequested_time_in_server", 2**31 - 1),
)
_FOLDERS = "triton-adapter-grpc-"
_SOCKET = "s"
# The kernel takes so much for the path of a socket, and a folder's name ends with eight characters.
_PATH_BYTES = 107
_NAME_BYTES = len(f"/{_FOLDERS}12345678/{_SOCKET}")
_SHORT = ("/tmp", "/dev/shm")  # noqa: S108 - the folder made there is its owner's alone


# Connections of each listener of operators; http/server.py leaves descriptors for them.
MOST_PROBES = 32
_BACKLOG = 128
# For answers of operators' listeners, which close last: the work that they tell of has ended, and
# whoever still sends a request or does not read its answer is not waited for.
_PROBES_SECONDS = 0.5


class Listener(Protocol):
    """Listens for gRPC clients."""

    async def listen(self, host: str, port: int, path: str | None) -> int:
        """Listen; return the port, 0 for a socket of unix."""

    async def close(self, grace_seconds: float) -> None:
        """Accept nothing new, and answer what is in flight."""

    def fallback_began(self) -> None:
        """Note that the fallback server begins with a call."""


class HttpListener(Protocol):
    """Serves HTTP at one address."""

    async def open(self, address: Address) -> int:
        """Listen; return the port, 0 for a socket of unix."""

    async def close(self, grace_seconds: float) -> None:
        """Accept nothing new, and answer what is in hand."""


class _Beginnings(grpc.GenericRpcHandler):
    """Tells a listener of each call that the server begins with. It is asked first, and handles
    none.
    """

    listener: Listener | None = None

    def service(self, _: grpc.HandlerCallDetails) -> None:
        """Tell the listener of a call."""
        if self.listener is not None:
            self.listener.fallback_began()


class _ProbeProtocol(web.RequestHandler):
    """Serves a connection of an operator as aiohttp does, but refuses what is no HTTP request as
    the application refuses requests, and without a traceback in the log.
    """

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to a request that cannot be read."""
        if status != HTTPStatus.BAD_REQUEST or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        response = web.json_response(
            {"error": "this is not an HTTP request"},
            status=status,
            headers={"Server": "triton-adapter"},  # or aiohttp names itself and its version
        )
        response.force_close()
        return response


class _ProbeConnection:
    """A connection of an operator. aiohttp's own protocol serves it, and has all other methods of
    an asyncio.Protocol.
    """

    def __init__(
        self, protocol: web.RequestHandler, on_lost: Callable[["_ProbeConnection"], None]
    ) -> None:
        self.protocol = protocol
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._is_unwanted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.protocol, name)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve the connection, unless it was closed before."""
        self._transport = cast("asyncio.Transport", transport)
        self.protocol.connection_made(transport)
        if self._is_unwanted:
            self._transport.abort()

    def connection_lost(self, error: BaseException | None) -> None:
        """Count the connection no longer."""
        self._on_lost(self)
        self.protocol.connection_lost(error)

    def close(self) -> None:
        """Close the connection at once."""
        self._is_unwanted = True
        if self._transport is not None:
            self._transport.abort()


class _ProbeConnections:
    """Bounds the connections of a listener of operators, which aiohttp does not. One too many ends
    the one that has waited for a request, or for the rest of its head, for longest.
    """

    def __init__(self) -> None:
        self._open: dict[object, _ProbeConnection] = {}  # by the protocol of aiohttp
        self._idle: dict[object, None] = {}  # without a request, the oldest first

    def accept(self, server: web.Server) -> asyncio.Protocol:
        """Return the protocol of a new connection; close another one if there are too many, or the
        new one if each has a request.
        """
        loop = asyncio.get_running_loop()
        protocol = _ProbeProtocol(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # none is kept
            auto_decompress=False,  # the application refuses compressed bodies
        )
        connection = _ProbeConnection(protocol, self._forget)
        self._open[connection.protocol] = connection
        self._idle[connection.protocol] = None
        if len(self._open) > MOST_PROBES:
            oldest = self._open[next(iter(self._idle))]
            self._forget(oldest)
            oldest.close()
        return cast("asyncio.Protocol", connection)

    @web.middleware
    async def count_request(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer a request, while its connection is not idle."""
        protocol = request.protocol
        self._idle.pop(protocol, None)
        try:
            return await handler(request)
        finally:
            if protocol in self._open:
                self._idle[protocol] = None

    def _forget(self, connection: _ProbeConnection) -> None:
        """Count a connection no longer."""
        self._open.pop(connection.protocol, None)
        self._idle.pop(connection.protocol, None)


class Listeners:
    """Opens and closes the listeners of one adapter."""

    def __init__(
        self,
        grace_seconds: float,  # for requests in flight, when the listeners close
        max_message_bytes: int,
    ) -> None:
        self.addresses: dict[str, str] = {}  # of open listeners, with port 0 resolved
        self.open_to_others: list[str] = []  # listeners that other machines may reach
        self._max_message_bytes = max_message_bytes
        self._grace_seconds = grace_seconds
        self._probes: list[tuple[asyncio.Server, web.AppRunner]] = []
        self._probe_files: list[sockets.SocketFile] = []  # of unix sockets
        self._http: list[HttpListener] = []
        self._grpc: list[Listener] = []
        self._fallbacks: list[grpc.aio.Server] = []  # each behind a listener
        self._folders: list[tempfile.TemporaryDirectory[str]] = []

    async def open_probes(self, name: str, address: Address, application: web.Application) -> None:
        """Serve the pages of operators, unless the listener is off."""
        if address.kind == "off":
            return
        address = _available(address)
        connections = _ProbeConnections()
        application.middlewares.insert(0, connections.count_request)
        runner = web.AppRunner(application, shutdown_timeout=_PROBES_SECONDS)
        await runner.setup()
        accept = partial(connections.accept, cast("web.Server", runner.server))
        with _naming(name, address):
            if address.kind == "unix":
                loop = asyncio.get_running_loop()
                server = await loop.create_unix_server(accept, address.path, backlog=_BACKLOG)
                self._probe_files.append(sockets.SocketFile(address.path))
            else:
                server = await sockets.listen(accept, *address.host_port, _BACKLOG)
        self._probes.append((server, runner))
        port = 0 if address.kind == "unix" else server.sockets[0].getsockname()[1]
        self._opened(name, address, port)

    async def open_http(self, name: str, address: Address, listener: HttpListener) -> None:
        """Serve HTTP, unless the listener is off."""
        if address.kind == "off":
            return
        address = _available(address)
        with _naming(name, address):
            port = await listener.open(address)
        self._http.append(listener)
        self._opened(name, address, port)

    async def open_grpc(
        self,
        name: str,
        address: Address,
        services: Iterable[grpc.GenericRpcHandler],
        make: Callable[[str], Listener],  # gets the address of the fallback server
    ) -> None:
        """Start the fallback server, which has the services, and the listener before it."""
        if address.kind == "off":
            return
        address = _available(address)
        await REPOSITORY.run(_sweep)
        folder = _own_folder()
        self._folders.append(folder)
        beginnings = _Beginnings()
        fallback = self._make_server([beginnings, *services])
        fallback_address = f"unix:{folder.name}/{_SOCKET}"
        fallback.add_insecure_port(fallback_address)
        await fallback.start()
        self._fallbacks.append(fallback)
        listener = beginnings.listener = make(fallback_address)
        with _naming(name, address):
            path = address.path if address.kind == "unix" else None
            port = await listener.listen(address.host, address.port, path)
        self._grpc.append(listener)
        self._opened(name, address, port)

    def _make_server(self, services: Sequence[grpc.GenericRpcHandler]) -> grpc.aio.Server:
        limits = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
        options = [*_GRPC_OPTIONS, *((limit, self._max_message_bytes) for limit in limits)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers(services)
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
        """Close the listeners of operators, which answer until the end of a stop."""
        for file in self._probe_files:
            file.remove()
        for server, _ in self._probes:
            server.close()
        await asyncio.gather(*(runner.cleanup() for _, runner in self._probes))

    def _opened(self, name: str, address: Address, port: int) -> None:
        real = str(Address("tcp", address.host, port) if address.kind == "tcp" else address)
        self.addresses[name] = real
        if address.is_open_to_others:
            self.open_to_others.append(f"{name} {real}")
        log.info("adapter.listening", extra={"listener": name, "address": real})


def _available(address: Address) -> Address:
    """Return the address with the host that this machine has for it."""
    return replace(address, host=sockets.available(address.host))


@contextmanager
def _naming(name: str, address: Address) -> Iterator[None]:
    """Name the listener and its setting in the OSError of an address that is not available."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # grpc raises RuntimeError
        setting = f"setting {name}, {flag_of(name)}, {variable_of(name)}"
        raise OSError(f"{name} cannot listen at {address} ({setting}): {error}") from error


def _places() -> list[str]:
    """Return the folders in which one for a socket can be made, the one for temporary files first.

    That may have a path which is too long for a socket: TMPDIR is not ours to shorten.
    """
    folders = dict.fromkeys((tempfile.gettempdir(), *_SHORT))
    return [place for place in folders if len(os.fsencode(place)) + _NAME_BYTES <= _PATH_BYTES]


def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for a socket that nobody else may reach."""
    reason = f"TMPDIR, {tempfile.gettempdir()}, is too long"
    for place in _places():
        try:
            return tempfile.TemporaryDirectory(prefix=_FOLDERS, dir=place)
        except OSError as error:
            reason = str(error)
    raise OSError(
        f"the gRPC listeners need a folder for a socket, at most {_PATH_BYTES - _NAME_BYTES} bytes "
        f"long: TMPDIR, /tmp or /dev/shm; {reason}"
    )


def _sweep() -> None:
    """Remove folders of killed adapters of this user: sockets that nobody listens at."""
    for folder in chain.from_iterable(Path(place).glob(f"{_FOLDERS}*") for place in _places()):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if folder.lstat().st_uid != os.getuid() or not (folder / _SOCKET).is_socket():
                continue  # its socket may be about to be created
            try:
                probe.connect(str(folder / _SOCKET))
            except ConnectionRefusedError:
                shutil.rmtree(folder)
