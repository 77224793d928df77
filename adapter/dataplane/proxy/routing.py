"""Which calls go to Triton directly, as the proxy asks it, and the heads of calls and answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote_to_bytes

from adapter.dataplane.proxy.metadata import odd_header, seconds_of
from adapter.errors import AdapterError
from adapter.protocols.http2 import frames
from adapter.protocols.http2.headers import (
    Headers,
    check_answer,
    check_request,
    content_length,
    encoded,
)


@dataclass(frozen=True, slots=True)
class Call:
    """The headers of a request. `direct` is the header block for Triton, None when the call may not
    go there; `fallback` the one for the fallback server. `mesh_id` is the model that the metadata
    names, `seconds` the timeout. A `refusal` is answered at once. `max_bytes` bounds the message
    for the fallback server; None for a stream, whose messages that server judges. `length` is
    `content-length`, `http_status` the response to what is not gRPC. `direct_start` begins the
    HEADERS frame of `direct`; empty where it needs CONTINUATION.
    """

    path: bytes
    fallback: bytes
    direct: bytes | None
    mesh_id: str | None
    seconds: float | None
    refusal: str | None
    max_bytes: int | None
    length: int | None
    http_status: int | None
    direct_start: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The headers of a response (`is_first`), or its trailers; `status` is `grpc-status`. Its frame
    begins with `head_start`, or with `end_start` where it ends the stream; both are empty where
    it needs CONTINUATION.
    """

    block: bytes
    head_start: bytes
    end_start: bytes
    status: int | None
    text: str
    is_first: bool


class DirectCall(Protocol):
    """One inference that goes to Triton directly. It holds its model until Triton has finished it,
    possibly after the client was answered or has left.
    """

    def on_unload(self, act: Callable[[], None]) -> None:
        """Run `act` when an unload begins before the call ends; at once where it has begun."""

    def answered(self) -> None:
        """Triton succeeded: end the call."""

    def cancelled(self) -> None:
        """Count the call of a client that left; `ended`, or `abandoned` first, follows."""

    def abandoned(self) -> None:
        """Nobody waits for the response any more; Triton works on it until `ended`."""

    def ended(self) -> None:
        """Triton has finished an abandoned call."""

    def fault(self, status: int, text: str) -> AdapterError:
        """Return the error that Triton's status means. The call does not end."""

    async def failed(self, error: AdapterError, *, is_over: bool) -> tuple[int, str]:
        """Return the gRPC status for the client. `is_over`: Triton has finished the call."""


class RoutingPolicy(Protocol):
    def is_forwarded(self, header: bytes) -> bool:
        """False for headers that are not for Triton."""

    def route(self, found: Mapping[bytes, bytes]) -> tuple[bool, str | None]:
        """Return whether a call with these headers may go direct, and the metadata's model id."""

    def max_bytes(self, path: bytes) -> int | None:
        """Return the limit of a message that goes to the fallback server; None for streams."""

    def refused(self, path: bytes, error: AdapterError) -> tuple[int, str]:
        """Return the gRPC status for a call that was not forwarded."""

    def admit(self, name: bytes, mesh_id: str | None) -> DirectCall | None:
        """None: use the fallback server, which also produces the error response."""

    def error_of(self, name: bytes) -> AdapterError | None:
        """Return why the model takes no inference now; None where it does."""


def read_call(policy: RoutingPolicy, headers: Headers) -> Call:
    check_request(headers)
    found = dict(headers)
    refusal = odd_header(headers)
    may_go, mesh_id = policy.route(found) if refusal is None else (False, None)
    fallback = encoded(headers)
    meant = [header for header in headers if policy.is_forwarded(header[0])] if may_go else []
    direct = fallback if len(meant) == len(headers) else encoded(meant) if meant else None
    seconds = seconds_of(found.get(b"grpc-timeout", b""))
    path, length = found[b":path"], content_length(headers)
    most = policy.max_bytes(path)
    start = frames.headers_start(direct or b"", end=False)
    status = _http_status(found)
    return Call(path, fallback, direct, mesh_id, seconds, refusal, most, length, status, start)


def _http_status(found: Mapping[bytes, bytes]) -> int | None:
    if found[b":method"] != b"POST":
        return 405
    return None if found.get(b"content-type", b"").startswith(b"application/grpc") else 415


def read_answer(headers: Headers) -> Answer:
    check_answer(headers)
    found = dict(headers)
    status = found.get(b"grpc-status", b"")
    block = encoded(headers)
    return Answer(
        block,
        frames.headers_start(block, end=False),
        frames.headers_start(block, end=True),
        int(status) if status.isdigit() and len(status) < 3 else None,  # noqa: PLR2004
        unquote_to_bytes(found.get(b"grpc-message", b"")).decode("utf-8", "replace"),
        b":status" in found,
    )
