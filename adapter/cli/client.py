"""Asks a running adapter, and shows its errors and the progress of a request. Imports little."""

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import BadStatusLine, HTTPConnection, HTTPException, RemoteDisconnected
from typing import Any
from urllib.parse import urlsplit

from adapter.cli.options import TOKEN_HINT, read_settings
from adapter.cli.parser import PROG
from adapter.cli.text import RED, add_colour, can_rewrite, escape, format_columns
from adapter.core.byte_sizes import format_size
from adapter.errors import AdapterError, InvalidSettings

_HTTP_PORT = 80
_SETTINGS_FRAME = b"\x04\x00\x00\x00\x00\x00"  # type, no flags, stream 0: HTTP/2 begins so
_MAX_CHARACTERS = 60  # shown of an answer that is not HTTP
_MAX_BYTES = 300  # shown of an answer of another server, such as a page of HTML
_ADMIN_SECONDS = 10.0
_SILENT_SECONDS = 2.0  # before the first line of progress where lines cannot be written over
# Raised by code that reads an answer with other fields than those of this version.
FIELD_ERRORS = (LookupError, TypeError, AttributeError, ValueError)


class Unreachable(AdapterError):
    """Raised when a listener does not answer. Its hint names the flags that say where it is."""

    def __init__(self, target: "Target", reason: str) -> None:
        super().__init__(f"{target}: {reason}")
        flags = f"--config, --{target.listener} or --url"
        self.hint = f"is an adapter running there? {flags} say where it is"


class Refused(AdapterError):
    """Raised when a listener answers with an error in place of the adapter's state."""

    def __init__(self, target: "Target", answer: "Answer") -> None:
        super().__init__(f"{target} answers {answer.status}")
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Target:
    """Names the listener that a command asks."""

    host: str = "localhost"
    port: int = _HTTP_PORT
    socket_path: str = ""  # of a Unix socket, instead of host and port
    path: str = ""  # put before the path of each request; for a probe the whole path
    listener: str = field(default="admin", compare=False)  # the listener that the command needs

    def __str__(self) -> str:
        if self.socket_path:
            return f"unix:{self.socket_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds one answer of a listener."""

    status: int
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

    def text(self) -> str:
        """Return the body as text."""
        return self.body.decode(errors="replace").strip()

    def reason(self) -> str:
        """Return the reason that an error of the adapter gives, empty for other answers."""
        body = self.json()
        return str(body.get("error") or body.get("reason") or "") if isinstance(body, dict) else ""


# -- requests -----------------------------------------------------------------------------------


def find_target(args: argparse.Namespace, environ: Mapping[str, str], listener: str) -> Target:
    """Return the listener to ask: the one at --url, or the one with this name in the settings.

    Raises InvalidSettings.
    """
    if args.url is not None:
        return _parse_url(args.url, listener)
    address = getattr(read_settings(args, environ).settings, listener)
    if address.kind == "unix":
        return Target(socket_path=address.path, listener=listener)
    if address.kind == "off" or address.port == 0:
        reason = f"{str(address)!r}: no address to ask; name one by --url"
        raise InvalidSettings([f"setting {listener}: {reason}"])
    is_everywhere = address.host in {"0.0.0.0", "::"}  # noqa: S104 - compared; both take IPv4
    host = "127.0.0.1" if is_everywhere else address.host
    return Target(host, address.port, listener=listener)


def _parse_url(text: str, listener: str) -> Target:
    """Parse the value of --url. Raises InvalidSettings."""
    try:
        url = urlsplit(text)
        port = _HTTP_PORT if url.port is None else url.port
    except ValueError:  # such as letters in the port
        port = 0
    if port and url.scheme == "unix" and url.path:
        return Target(socket_path=url.path, listener=listener)
    if port and url.scheme == "http" and url.hostname:
        return Target(url.hostname, port, path=url.path.rstrip("/"), listener=listener)
    rule = "write http://HOST:PORT or unix:/SOCKET"
    raise InvalidSettings([f"flag --url: {text!r}: {rule}"])


class _Connection(HTTPConnection):
    """Connects to a port, or to a Unix socket."""

    def __init__(self, target: Target, timeout_seconds: float | None) -> None:
        super().__init__(target.host, target.port, timeout=timeout_seconds)
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
    """Send one request and return the whole answer. Raises Unreachable."""
    try:
        with closing(_Connection(target, timeout_seconds)) as connection:
            connection.request(method, target.path + path, body, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, response.read())
    except (OSError, HTTPException, UnicodeError) as error:  # UnicodeError: no name of a host
        raise Unreachable(target, _describe_failure(error)) from error


def _describe_failure(error: Exception) -> str:
    """Return why a request has no answer, in words for a terminal."""
    if isinstance(error, BadStatusLine) and not isinstance(error, RemoteDisconnected):
        line = str(error.args[0])
        if _SETTINGS_FRAME in line.encode("latin-1", "replace"):
            return "no listener of HTTP/1.1; it speaks HTTP/2, as those of gRPC do"
        return f"no listener of HTTP; it begins with {escape(line[:_MAX_CHARACTERS])}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def read_state(target: Target, query: str = "") -> dict[str, Any]:
    """Return /debug/state of the admin listener. Raises Refused and Unreachable."""
    answer = ask(target, "GET", f"/debug/state{query}", timeout_seconds=_ADMIN_SECONDS)
    state = answer.json() if answer.is_ok else None
    if not isinstance(state, dict):
        raise Refused(target, answer)
    return state


@contextmanager
def explain_odd_answer(target: Target) -> Iterator[None]:
    """Raise AdapterError in place of an error in reading the fields of an answer."""
    try:
        yield
    except FIELD_ERRORS as error:
        reason = f"{target} is not an adapter of this version: {error!r}"
        raise AdapterError(reason) from error


# -- errors -------------------------------------------------------------------------------------

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
    "NoRoom": _LATER,
    "SourceMissing": "the path must exist where the adapter runs",
    "StoreDenied": "see docs/stores.md#credentials",
    "StoreUnavailable": "see docs/stores.md#when-something-is-wrong",
    "TooManyConnections": _LATER,
}
_UNKNOWN_PATH = "unknown path"  # in the reason of a listener that does not serve the call
# By words of the reason, for codes with several causes and for errors without a code.
_HINTS_BY_WORDS = {
    "only signed calls of the endpoint reach models": (
        f"{TOKEN_HINT}; without a control_token use a unix socket or signed calls"
    ),
    "see docs/security.md#the-control-token": TOKEN_HINT,
    "is loaded, and no store has it": (
        f"`{PROG} list` has the models of the stores, `{PROG} ps` those that are loaded"
    ),
    "Triton itself lacks this backend": (
        "Triton's log says where it looked; the package may be fine"
    ),
    'name it as "entry"': f"`{PROG} load NAME SOURCE --entry=MODEL` names it",
}


def show_failure(answer: Answer, target: Target, *, as_json: bool, hint: str = "") -> int:
    """Show an error answer, and return 1 for the exit code.

    The adapter's error is shown in words on stderr, or as its JSON on stdout. The answer of another
    server is always shown on stderr.
    """
    body = answer.json()
    beginning = answer.text()[:_MAX_BYTES]
    if as_json and body is not None:
        print(json.dumps(body, indent=2))
        return 1
    if as_json:
        hint = hint or _describe_stranger(target)
        error = {"error": f"{answer.status}: {beginning}", "hint": hint}
        print(json.dumps(error), file=sys.stderr)
        return 1
    figures = body if isinstance(body, dict) else {}
    code = str(figures.get("code") or "")
    reason = answer.reason() or beginning or "no reason given"
    title = add_colour(escape(f"{PROG}: {answer.status} {code}".rstrip()), RED, sys.stderr)
    lines = [f"{title}: " + "\n  ".join(map(escape, reason.strip().splitlines()))]
    if "needed_bytes" in figures:
        lines += format_columns(_list_figures(figures))
    hint = hint or _find_hint(code, answer.reason(), target)
    if hint:
        lines.append(escape(f"  {hint}"))
    for line in lines:
        print(line, file=sys.stderr)
    return 1


def _find_hint(code: str, reason: str, target: Target) -> str:
    """Return what to do about an error, empty if there is no advice."""
    for words, hint in _HINTS_BY_WORDS.items():
        if words in reason:
            return hint
    # errors of the listener `admin` have a reason, those of `http` a code as well
    evidence = reason if target.listener == "admin" else code
    if _UNKNOWN_PATH in reason or not evidence:
        return _describe_stranger(target)
    return _HINTS.get(code, "")


def _describe_stranger(target: Target) -> str:
    """Return what to do about an answer that the adapter's listener never gives."""
    name = target.listener
    flags = f"--{name} or --url say where that is"
    return f"{target} is not the listener `{name}` of an adapter; {flags}"


def _list_figures(error: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each figure of a lack of memory."""
    rows = []
    more_than = error.get("needs_more_than_bytes")
    for name in ("needed_bytes", "free_bytes", "limit_bytes", "device", "matched"):
        value = error.get(name)
        if value is None:
            continue
        title = f"  {name.removesuffix('_bytes')}"
        is_size = isinstance(value, int)
        text = f"{format_size(value)} ({value})" if is_size else str(value)
        if name == "needed_bytes" and value == more_than:
            text = f"more than {text}"
        rows.append([title, text])
    return rows


# -- progress -----------------------------------------------------------------------------------


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr that a request is in progress; yield a function that shows its current step.

    A terminal shows a line that is written over. Elsewhere each step is a line, after a while.
    """
    started_at = time.monotonic()
    if not can_rewrite(sys.stderr):
        last_step = ""

        def print_step(step: str) -> None:
            nonlocal last_step
            is_slow = time.monotonic() - started_at >= _SILENT_SECONDS
            if is_slow and step not in {"", last_step}:
                last_step = step
                print(escape(f"{title}: {step}"), file=sys.stderr, flush=True)

        yield print_step
        return
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.text import Text  # noqa: PLC0415

    with Console(stderr=True).status(Text(escape(title))) as status:

        def update_line(step: str) -> None:
            text = f"{title}: {step}" if step else title
            status.update(Text(escape(f"{text} ({time.monotonic() - started_at:.0f} s)")))

        yield update_line
