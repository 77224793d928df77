"""Where a running adapter is, and one request to it. Only the standard library: starts fast."""

import argparse
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import (
    BadStatusLine,
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    RemoteDisconnected,
)
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from adapter.cli.options import load
from adapter.cli.text import printable
from adapter.errors import AdapterError, InvalidSettings

if TYPE_CHECKING:
    from adapter.settings import Address

_HTTP_PORT = 80
_SETTINGS_FRAME = b"\x04\x00\x00\x00\x00\x00"  # its type, no flags, stream 0: how HTTP/2 begins
_MOST_SHOWN = 60  # characters of what is no answer of HTTP


class Unreachable(AdapterError):
    """Nobody answered. `hint` is what to do, for who runs a command on a terminal."""

    def __init__(self, target: "Target", reason: str) -> None:
        super().__init__(f"{target}: {reason}")
        where = f"--config, --{target.listener} or --url"
        self.hint = f"is an adapter running there? {where} say where it is"


@dataclass(frozen=True, slots=True)
class Target:
    """A listener of HTTP. With a `socket_path` host and port mean nothing. `path` has no slash at
    its end, and is what stands before the path of each request, or the whole of it for a probe.
    `listener` is the one that is wanted there.
    """

    host: str = "localhost"
    port: int = _HTTP_PORT
    socket_path: str = ""
    path: str = ""
    listener: str = field(default="admin", compare=False)

    def __str__(self) -> str:
        if self.socket_path:
            return f"unix:{self.socket_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_good(self) -> bool:
        return self.status == HTTPStatus.OK

    def json(self) -> Any:
        """Return what the body says, None where that is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def target_of(args: argparse.Namespace, environ: Mapping[str, str], listener: str) -> Target:
    """Return what --url names, else where the settings have this listener, for this machine.

    Raises InvalidSettings.
    """
    if args.url is None:
        return _of_listener(listener, getattr(load(args, environ).settings, listener))
    try:
        url = urlsplit(args.url)
        port = _HTTP_PORT if url.port is None else url.port
        is_whole = port != 0 and bool({"http": url.hostname, "unix": url.path}.get(url.scheme))
    except ValueError:  # the port
        is_whole = False
    if not is_whole:
        rule = "write http://HOST:PORT or unix:/SOCKET"
        raise InvalidSettings([f"flag --url: {args.url!r}: {rule}"])
    if url.scheme == "unix":
        return Target(socket_path=url.path, listener=listener)
    return Target(url.hostname or "", port, path=url.path.rstrip("/"), listener=listener)


def _of_listener(name: str, address: "Address") -> Target:
    if address.kind == "unix":
        return Target(socket_path=address.path, listener=name)
    if address.kind == "off" or address.port == 0:
        raise InvalidSettings(
            [f"setting {name}: {str(address)!r}: no address to ask; name one by --url"]
        )
    is_everywhere = address.host in {"0.0.0.0", "::"}  # noqa: S104 - compared; both take IPv4
    return Target("127.0.0.1" if is_everywhere else address.host, address.port, listener=name)


class _Connection(HTTPConnection):
    """To a port, or to a socket of the file system."""

    def __init__(self, target: Target, seconds: float | None) -> None:
        super().__init__(target.host, target.port, timeout=seconds)
        self._socket_path = target.socket_path

    def connect(self) -> None:
        if not self._socket_path:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._socket_path)


@contextmanager
def asking(
    target: Target,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    seconds: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> Iterator[HTTPResponse]:
    """Send one request, and give the answer as soon as its head is there. `seconds` is how long
    each step may take without a byte; None: as long as it likes. Raises Unreachable.
    """
    connection = _Connection(target, seconds)
    try:
        connection.request(method, path, body, dict(headers or {}))
        yield connection.getresponse()
    except (OSError, HTTPException) as error:
        raise Unreachable(target, _reason(error)) from error
    finally:
        connection.close()


def _reason(error: Exception) -> str:
    if isinstance(error, BadStatusLine) and not isinstance(error, RemoteDisconnected):
        line = str(error.args[0])
        if _SETTINGS_FRAME in line.encode("latin-1", "replace"):
            return "no listener of HTTP/1.1; it speaks HTTP/2, as those of gRPC do"
        return f"no listener of HTTP; it begins with {printable(line[:_MOST_SHOWN])}"
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return said or type(error).__name__


def ask(target: Target, method: str, path: str, *args: Any, **given: Any) -> Answer:
    """Return the whole answer to one request; the rest is as for `asking`."""
    with asking(target, method, path, *args, **given) as response:
        return Answer(response.status, dict(response.headers.items()), response.read())
