"""Finds a running adapter, sends it one request, and shows an error answer. Imports little."""

import argparse
import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import (
    BadStatusLine,
    HTTPConnection,
    HTTPException,
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
_SETTINGS_FRAME = b"\x04\x00\x00\x00\x00\x00"  # type, no flags, stream 0: HTTP/2 begins so
_SHOWN_CHARACTERS = 60  # of an answer that is not HTTP
_ADMIN_SECONDS = 10.0
_GUESS_SECONDS = 2.0


class Unreachable(AdapterError):
    """Raised when a listener does not answer. Its hint names the flags that lead elsewhere."""

    def __init__(self, target: "Target", reason: str) -> None:
        super().__init__(f"{target}: {reason}")
        where = f"--config, --{target.listener} or --url"
        self.hint = f"is an adapter running there? {where} say where it is"


class Refused(Exception):
    """Raised when the admin listener answers with an error instead of its state."""

    def __init__(self, answer: "Answer") -> None:
        super().__init__(answer.status)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Target:
    """Names the listener that a command asks."""

    host: str = "localhost"
    port: int = _HTTP_PORT
    socket_path: str = ""  # of a Unix socket, instead of host and port
    path: str = ""  # put before the path of each request; for a probe the whole path
    listener: str = field(default="admin", compare=False)  # which one the caller wants

    def __str__(self) -> str:
        if self.socket_path:
            return f"unix:{self.socket_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds one answer of a listener."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_ok(self) -> bool:
        """Return whether the status is 200."""
        return self.status == HTTPStatus.OK

    def json(self) -> Any:
        """Return the parsed body, or None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def find_target(args: argparse.Namespace, environ: Mapping[str, str], listener: str) -> Target:
    """Return the target that --url names, or the address of this listener in the settings.

    Raises InvalidSettings.
    """
    if args.url is None:
        return _listener_target(listener, getattr(load(args, environ).settings, listener))
    try:
        url = urlsplit(args.url)
        port = _HTTP_PORT if url.port is None else url.port
        place = {"http": url.hostname, "unix": url.path}.get(url.scheme)
    except ValueError:  # urlsplit found letters in the port
        port = 0
        place = None
    if port == 0 or not place:
        rule = "write http://HOST:PORT or unix:/SOCKET"
        raise InvalidSettings([f"flag --url: {args.url!r}: {rule}"])
    if url.scheme == "unix":
        return Target(socket_path=url.path, listener=listener)
    return Target(url.hostname or "", port, path=url.path.rstrip("/"), listener=listener)


def _listener_target(name: str, address: "Address") -> Target:
    """Return where a command on this machine reaches a listener with this address."""
    if address.kind == "unix":
        return Target(socket_path=address.path, listener=name)
    if address.kind == "off" or address.port == 0:
        raise InvalidSettings(
            [f"setting {name}: {str(address)!r}: no address to ask; name one by --url"]
        )
    is_everywhere = address.host in {"0.0.0.0", "::"}  # noqa: S104 - compared; both take IPv4
    return Target("127.0.0.1" if is_everywhere else address.host, address.port, listener=name)


class _Connection(HTTPConnection):
    """Connects to a port, or to a Unix socket."""

    def __init__(self, target: Target, seconds: float | None) -> None:
        super().__init__(target.host, target.port, timeout=seconds)
        self._socket_path = target.socket_path

    def connect(self) -> None:
        """Open the socket."""
        if not self._socket_path:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._socket_path)


def ask(
    target: Target,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    timeout_seconds: float | None = None,  # without a byte; None waits forever
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send one request and return the whole answer.

    Raises Unreachable.
    """
    connection = _Connection(target, timeout_seconds)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, dict(response.headers.items()), response.read())
    except (OSError, HTTPException) as error:
        raise Unreachable(target, _describe(error)) from error
    finally:
        connection.close()


def read_state(target: Target, query: str = "") -> dict[str, Any]:
    """Return /debug/state of the admin listener.

    Raises Refused and Unreachable.
    """
    answer = ask(target, "GET", f"/debug/state{query}", timeout_seconds=_ADMIN_SECONDS)
    state = answer.json() if answer.is_ok else None
    if not isinstance(state, dict):
        raise Refused(answer)
    return state


def _describe(error: Exception) -> str:
    """Return why there is no answer, in words for a terminal."""
    if isinstance(error, BadStatusLine) and not isinstance(error, RemoteDisconnected):
        line = str(error.args[0])
        if _SETTINGS_FRAME in line.encode("latin-1", "replace"):
            return "no listener of HTTP/1.1; it speaks HTTP/2, as those of gRPC do"
        return f"no listener of HTTP; it begins with {printable(line[:_SHOWN_CHARACTERS])}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


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
    "ModelTooLarge": f"unloading others does not help; `{PROG} ps` shows the limit",
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
# By words of the reason, for codes with several causes.
_HINTS_BY_WORDS = {
    "only signed calls of the endpoint reach models": (
        f"{TOKEN_HINT}; without a control_token use a unix socket or signed calls"
    ),
    "Triton itself lacks this backend": (
        "Triton's log says where it looked; the package may be fine"
    ),
    'name it as "entry"': f"`{PROG} load NAME SOURCE --entry=MODEL` names it",
}
_SHOWN_BYTES = 300  # of an answer of another server, such as a page of HTML
_STOPPED_EARLY = "needs more than"  # in the text of a load that was ended early
_FIGURES = ("needed_bytes", "free_bytes", "limit_bytes", "device", "matched")


def show_failure(answer: Answer, target: Target, *, as_json: bool, hint: str = "") -> int:
    """Show an error answer in words on stderr, or as JSON on stdout, and return the exit code.

    An answer of another server, which is not JSON, becomes one line of JSON on stderr.
    """
    body = answer.json()
    if as_json and body is not None:
        print(json.dumps(body, indent=2))
        return 1
    if as_json:
        error = {
            "error": f"{answer.status}: {_beginning(answer)}",
            "hint": hint or _guess_server(target),
        }
        print(json.dumps(error), file=sys.stderr)
        return 1
    for line in _failure_lines(answer, body if isinstance(body, dict) else {}, target, hint):
        print(line, file=sys.stderr)
    return 1


def _failure_lines(answer: Answer, body: dict[str, Any], target: Target, hint: str) -> list[str]:
    """Return the reason, the figures of a lack of memory, and what to do."""
    code = str(body.get("code") or "")
    reason = str(body.get("error") or body.get("reason") or _beginning(answer)).strip()
    head = coloured(printable(f"{PROG}: {answer.status} {code}".rstrip()), RED, sys.stderr)
    lines = [f"{head}: {_indent_lines(reason or 'no reason given')}"]
    if "needed_bytes" in body:
        lines += columns(_figure_rows(body, is_minimum=_STOPPED_EARLY in reason))
    hints_by_words = [text for words, text in _HINTS_BY_WORDS.items() if words in reason]
    hint = hint or next(iter(hints_by_words), _HINTS.get(code, ""))
    if not hint and not code:
        hint = _guess_server(target)
    return [*lines, printable(f"  {hint}")] if hint else lines


def _beginning(answer: Answer) -> str:
    return answer.body[:_SHOWN_BYTES].decode(errors="replace").strip()


def _guess_server(target: Target) -> str:
    """Return which server may have given an answer that the wanted listener never gives."""
    if target.listener != "admin" and _is_admin(target):
        flags = f"--{target.listener} or --url say where `{target.listener}` is"
        return f"{target} is an adapter's admin listener; {flags}"
    return f"this answer is not from an adapter's listener; asked was {target}"


def _is_admin(target: Target) -> bool:
    try:
        state = ask(target, "GET", "/debug/state", timeout_seconds=_GUESS_SECONDS).json()
    except Unreachable:
        return False
    return isinstance(state, dict) and "models" in state and "failures" in state


def _indent_lines(text: str) -> str:
    """Escape each line of a text of Triton, and indent all but the first."""
    return "\n  ".join(printable(line) for line in text.splitlines())


def _figure_rows(body: Mapping[str, Any], *, is_minimum: bool) -> list[list[str]]:
    """Return a row for each figure of a lack of memory, the needed bytes first."""
    rows = []
    for name in _FIGURES:
        value = body.get(name)
        if value is None:
            continue
        title = f"  {name.removesuffix('_bytes')}"
        if name == "needed_bytes" and is_minimum:
            title += ", at least"
        is_size = isinstance(value, int)
        rows.append([title, f"{format_size(value)} ({value})" if is_size else str(value)])
    return rows
