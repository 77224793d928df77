"""Asks the admin listener, over TCP or a unix socket. Only the standard library: starts fast."""

import socket
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit


def why_not_ready(url: str, limit_seconds: float) -> str:
    """Return an empty text if the answer is 200, else the answer or the reason for none.

    A unix socket is asked for /readyz.
    """
    path = "/readyz" if url.startswith("unix:") else urlsplit(url).path
    return why_not_ok("GET", url, path, limit_seconds)


def why_not_ok(method: str, url: str, target: str, limit_seconds: float) -> str:
    """Return as `why_not_ready`; `target` is the path to request at the address of `url`."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "localhost", parts.port, timeout=limit_seconds)
    try:
        if parts.scheme == "unix":
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(limit_seconds)
            connection.sock.connect(parts.path)
        connection.request(method, target)
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
    except (OSError, HTTPException) as error:
        return f"{url}: {str(error) or type(error).__name__}"
    finally:
        connection.close()
    return "" if answer.status == HTTPStatus.OK else f"{url}: {answer.status} {body}"
