"""What the relay asks others: which calls may go straight to Triton, and what is told of errors."""

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
    """The head of a request. `direct` is the block for Triton when the call may go there as it is;
    `served` the block for the server beside us. `mesh_id` is what the metadata names, `seconds`
    the caller's own limit. `refusal`: why it is answered at once, and goes nowhere. `most_bytes`
    bounds its message where it does not go to Triton; None for a stream, of which others judge
    each. `length` is what `content-length` says. `http_status`: the answer to what is not gRPC.
    `direct_start`: of the frame of `direct`, empty where that needs more than one.
    """

    path: bytes
    served: bytes
    direct: bytes | None
    mesh_id: str | None
    seconds: float | None
    refusal: str | None
    most_bytes: int | None
    length: int | None
    http_status: int | None
    direct_start: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer, or its trailers; `status` as gRPC's `grpc-status` has it. Its frame
    begins with `head_start`, or with `end_start` where it ends the answer; empty where it needs
    more than one.
    """

    block: bytes
    head_start: bytes
    end_start: bytes
    status: int | None
    text: str
    is_alone: bool


class DirectCall(Protocol):
    """One inference that was let through. It holds its model until Triton has done with it, which
    may be after its caller has been told, or has left.
    """

    def when_model_goes(self, act: Callable[[], None]) -> None:
        """Called when an unload begins before Triton has done with it; at once when one has."""

    def answered(self) -> None:
        """Triton has, and the caller is told."""

    def cancelled(self) -> None:
        """The caller has left; what becomes of the model's lease is told besides."""

    def abandoned(self) -> None:
        """Nobody waits for the answer any more, and Triton still works on it, until `ended`."""

    def ended(self) -> None:
        """Triton has done with what nobody waits for."""

    def fault(self, status: int, text: str) -> AdapterError:
        """What Triton's status means. Ends nothing."""

    async def failed(self, error: AdapterError, *, is_over: bool) -> tuple[int, str]:
        """The status that the caller is told. `is_over`: Triton has done with it."""


class RoutingPolicy(Protocol):
    def is_for_triton(self, header: bytes) -> bool:
        """False for what ends here."""

    def route(self, found: Mapping[bytes, bytes]) -> tuple[bool, str | None]:
        """May a call with these headers go straight, and for which model by its metadata?"""

    def most_bytes(self, path: bytes) -> int | None:
        """Of the message of such a call that is served beside us; None for streams."""

    def refused(self, path: bytes, error: AdapterError) -> tuple[int, str]:
        """The status that the caller of a call is told that was never let through."""

    def admit(self, name: bytes, mesh_id: str | None) -> DirectCall | None:
        """None: it takes the slow way, where also refusals are spoken."""

    def why_not(self, name: bytes) -> AdapterError | None:
        """Why that model takes no inference now, where it does not."""


def read_call(policy: RoutingPolicy, headers: Headers) -> Call:
    check_request(headers)
    found = dict(headers)
    refusal = odd_header(headers)
    may_go, mesh_id = policy.route(found) if refusal is None else (False, None)
    served = encoded(headers)
    meant = [header for header in headers if policy.is_for_triton(header[0])] if may_go else []
    direct = served if len(meant) == len(headers) else encoded(meant) if meant else None
    seconds = seconds_of(found.get(b"grpc-timeout", b""))
    path, length = found[b":path"], content_length(headers)
    most = policy.most_bytes(path)
    start = frames.headers_start(direct or b"", end=False)
    status = _http_status(found)
    return Call(path, served, direct, mesh_id, seconds, refusal, most, length, status, start)


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
