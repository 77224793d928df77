"""Finds a running adapter, sends it one request, and shows an error answer. Starts fast."""

import argparse
import json
import socket
import sys
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

from adapter.cli.options import TOKEN_HINT, load
from adapter.cli.parser import PROG
from adapter.cli.text import RED, coloured, columns, printable
from adapter.core.sizing import format_size
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
    """A connection to a port, or to a Unix socket."""

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


_NO_ROOM = (
    f"unload a model that is not needed (`{PROG} ps`, `{PROG} unload NAME`) and try again; "
    "see docs/memory.md#why-a-load-is-refused"
)
_LATER = "try again in a while"
# By the `code` of the answer; docs/errors.md has them all.
_HINTS = {
    "AlreadyLoaded": f"`{PROG} ps` shows it; unload it first to load other files by this name",
    "BackendTimeout": (
        f"`{PROG} ps` shows what it waits for; see docs/operations.md#a-load-is-refused-or-fails"
    ),
    "BackendUnavailable": (
        f"`{PROG} healthcheck` says why the adapter is not ready; "
        "see docs/operations.md#it-is-not-ready"
    ),
    "InsufficientMemory": _NO_ROOM,
    "InvalidModel": (
        f"`{PROG} inspect PATH` checks a package without a load; "
        "see docs/packages.md#what-is-refused"
    ),
    "ModelNotFound": f"`{PROG} ps` lists what is loaded, `{PROG} load NAME SOURCE` loads it",
    "ModelNotReady": _LATER,
    "ModelTooLarge": f"unloading others does not help; `{PROG} memory` shows the limit",
    "OutOfMemory": _NO_ROOM,
    "Overloaded": _LATER,
    "NoRoom": _LATER,
    "SourceMissing": "the path must exist where the adapter runs",
    "StoreDenied": "see docs/stores.md#credentials",
    "StoreUnavailable": "see docs/stores.md#when-something-is-wrong",
    "TooManyConnections": _LATER,
    "Unauthenticated": TOKEN_HINT,
}
OUTSIDE_ROOTS = "outside the model roots"
# By words of the reason, where the code alone does not say it.
_HINTS_BY_WORDS = {
    "only signed calls of the endpoint reach models": (
        f"{TOKEN_HINT}; without a control_token use a unix socket or signed calls"
    ),
    "Triton itself lacks this backend": (
        "Triton's log says where it looked; the package may be fine"
    ),
    'name it as "entry"': f"`{PROG} load NAME SOURCE --entry=MODEL` names it",
}
_ADMIN_SECONDS = 2.0
_MOST_BYTES = 300  # of an answer that is not an adapter's, such as a page of HTML
_MORE = "needs more than"  # of a load that was ended early
_FIGURES = ("needed_bytes", "free_bytes", "limit_bytes", "device", "matched")


def show_failure(answer: Answer, target: Target, *, as_json: bool, hint: str = "") -> int:
    """Write the answer as it came to stdout, or in words to stderr; return the exit code.

    Of what is no JSON, as no adapter answers, the words are made JSON.
    """
    body = answer.json()
    if as_json and body is not None:
        print(json.dumps(body, indent=2))
        return 1
    if as_json:
        said = {
            "error": f"{answer.status}: {_beginning(answer)}",
            "hint": hint or _stranger(target),
        }
        print(json.dumps(said), file=sys.stderr)
        return 1
    for line in _lines(answer, body if isinstance(body, dict) else {}, target, hint):
        print(line, file=sys.stderr)
    return 1


def _lines(answer: Answer, body: dict[str, Any], target: Target, hint: str) -> list[str]:
    said = body.get("error") or body.get("reason") or _beginning(answer)
    code = str(body.get("code") or "")
    head = printable(f"{PROG}: {answer.status} {code}".rstrip())
    head = coloured(head, RED, sys.stderr)
    lines = [f"{head}: {_several(str(said).strip() or 'no reason given')}"]
    if "needed_bytes" in body:
        figures = [_figure(n, body[n]) for n in _FIGURES if body.get(n) is not None]
        if _MORE in str(said):
            figures[0][0] += ", at least"
        lines += columns(figures)
    by_words = [each for words, each in _HINTS_BY_WORDS.items() if words in str(said)]
    if hint := hint or next(iter(by_words), _HINTS.get(code, "")):
        lines += [printable(f"  {hint}")]
    elif not code:
        lines += [printable(f"  {_stranger(target)}")]
    return lines


def _beginning(answer: Answer) -> str:
    return answer.body[:_MOST_BYTES].decode(errors="replace").strip()


def _stranger(target: Target) -> str:
    """Say who gave an answer that the wanted listener never gives."""
    if target.listener != "admin" and _is_admin(target):
        flags = f"--{target.listener} or --url say where `{target.listener}` is"
        return f"{target} is an adapter's admin listener; {flags}"
    return f"this answer is not from an adapter's listener; asked was {target}"


def _is_admin(target: Target) -> bool:
    try:
        state = ask(target, "GET", "/debug/state", seconds=_ADMIN_SECONDS).json()
    except Unreachable:
        return False
    return isinstance(state, dict) and "models" in state and "failures" in state


def _several(text: str) -> str:
    """Texts of Triton have several lines, which a terminal may show as such."""
    return "\n  ".join(printable(line) for line in text.splitlines())


def _figure(name: str, value: object) -> list[str]:
    title = f"  {name.removesuffix('_bytes')}"
    if isinstance(value, int):
        return [title, f"{format_size(value)} ({value})"]
    return [title, str(value)]
