"""Defines what the relay asks of the sidecar, its errors, and the heads of calls and answers."""

import asyncio
import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeAlias
from urllib.parse import unquote_to_bytes

from adapter.relay.fallback_queue import FallbackQueue
from adapter.relay.headers import (
    MAX_TEXT_BYTES,
    HeaderBlockCache,
    Headers,
    check_answer,
    check_request,
    content_length,
    encoded,
)
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.turns import Turns

# the gRPC status of a call that failed, its text, and more trailers
Status: TypeAlias = tuple[int, str, Headers]
Connect: TypeAlias = Callable[[asyncio.Protocol], Coroutine[Any, Any, None]]

_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT = re.compile(rb"([0-9]{1,18}) *([HMSmun])")
_GRPC = re.compile(rb"application/grpc(?:[+; ]|$)")
_NAME = re.compile(rb"[a-z0-9._-]+")
HTTP_431 = 431  # Request Header Fields Too Large
ENCODINGS = (b"identity", b"deflate", b"gzip")
_NUMBERS_END = 2**31
_COST_BYTES = 8
_SHOWN_BYTES = 40


class Reason(Enum):
    """Says why the relay itself ends a call."""

    INVALID = "the request breaks a rule of gRPC or of protobuf"
    ENCODING = "its messages are compressed in a way that gRPC does not know"
    TOO_LARGE = "its headers or its message are over a limit"
    INCOMPLETE = "it ended before its message was complete"
    SLOW = "it is received too slowly"
    NOT_STARTED = "it was not complete when its model was unloaded, or the relay stopped"
    OVERLOADED = "too much is buffered"
    UNREACHABLE = "the upstream has nothing of it"
    BROKEN = "the upstream, which may have begun with it, was lost"
    LATE = "its time is up"
    ODD_ANSWER = "the upstream's answer breaks a rule"


class RelayError(Exception):
    """An error of the relay, which the policy words for the client."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Call:
    """The headers of a request, and where it may go."""

    path: bytes
    headers: Headers  # as far as they were read
    fallback: bytes = b""  # the header block for the fallback server
    direct: bytes | None = None  # the one for Triton; None when the call may not go there
    metadata_name: str | None = None  # the metadata's name for the model
    seconds: float | None = None  # the timeout
    refusal: RelayError | None = None  # answered at once
    # limit of the message for the fallback server; None for a stream, whose messages that server
    # judges, and for what is refused
    max_bytes: int | None = None
    length: int | None = None  # content-length
    encoding: bytes = b""  # grpc-encoding: of those messages whose flag says that they have it
    http_status: int | None = None  # the response to a request that is not gRPC


@dataclass(frozen=True, slots=True)
class Answer:
    """The headers of a response, or its trailers."""

    block: bytes
    status: int | None  # grpc-status
    text: str
    is_first: bool  # not trailers


class DirectCall(Protocol):
    """One inference that goes to Triton directly. It holds its model until Triton has finished it,
    possibly after the client was answered or has left.
    """

    @property
    def is_lost(self) -> bool:
        """Whether the model is gone: it can never answer, and no unload waits for the call."""

    @property
    def is_cancellable(self) -> bool:
        """Return whether to end the call at once and cancel it at Triton when the client leaves."""

    def on_unload(self, act: Callable[[], None]) -> None:
        """Run `act` when an unload begins before the call ends, at once if it has begun."""

    def answered(self) -> None:
        """End the call: Triton succeeded."""

    def note_missing_outputs(self) -> None:
        """Note that Triton's answer has none of the model's outputs."""

    def cancelled(self) -> None:
        """Count the call of a client that left; `ended`, or `abandoned` first, follows."""

    def abandoned(self) -> None:
        """Note that nobody waits for the response; Triton works on it until `ended`."""

    def check_fields(self, fields: bytes, *, is_whole: bool) -> None:
        """Raise Malformed for a large message with these fields, those of raw tensors left out.
        `is_whole`: there are no others.
        """

    def ended(self, error: Exception | None = None) -> None:
        """End an abandoned call, which Triton has finished, or broken off with `error`."""

    def make_error(self, status: int, text: str) -> Exception:
        """Return the error that Triton's status means. The call does not end."""

    async def failed(self, error: Exception, *, is_over: bool) -> Status:
        """End the call with `error`. `is_over`: Triton has finished it."""


class RoutingPolicy(Protocol):
    """Decides for the relay where calls go, and words its errors."""

    def is_forwarded(self, header: bytes) -> bool:
        """Return whether a header is for Triton."""

    def route(self, fields: Mapping[bytes, bytes]) -> tuple[bool, str | None]:
        """Return whether a call with these headers may go direct, and the metadata's model id."""

    def max_bytes(self, path: bytes) -> int | None:
        """Return the limit of a message that goes to the fallback server; None for streams."""

    def report_refusal(
        self, path: bytes, error: Exception, metadata_name: str | None, headers: Headers
    ) -> Status:
        """Log and count a call that was not forwarded; return the status to answer it with."""

    def word_error(self, error: RelayError) -> Status:
        """Return the status to answer an error with. It is not counted: the fallback server counts
        the call, or nobody does.
        """

    def admit(
        self, name: bytes, metadata_name: str | None, message: bytes
    ) -> DirectCall | Exception | None:
        """Admit a call to Triton. `message` is the request, or empty where it is large and comes in
        parts. None sends it to the fallback server; an error is returned where that server would
        answer a complete message with it at once.
        """

    async def wait_until_ready(self, name: bytes, metadata_name: str | None) -> Exception | None:
        """Wait until the model takes inferences, for which it may be loaded. Return None then, or
        the error that keeps the model from taking them.
        """


def read_call(policy: RoutingPolicy, headers: Headers) -> Call:
    """Return what a request's headers mean. Raise StreamFault if they are malformed."""
    check_request(headers)
    fields = dict(headers)
    refusal = find_odd_header(headers)
    status = _http_status(fields)
    is_grpc = refusal is None and status is None
    may_go, metadata_name = policy.route(fields) if is_grpc else (False, None)
    fallback = encoded(headers)
    meant = [header for header in headers if policy.is_forwarded(header[0])] if may_go else []
    direct = fallback if len(meant) == len(headers) else encoded(meant) if meant else None
    seconds = parse_timeout(fields.get(b"grpc-timeout", b""))
    if refusal is None and fields.get(b"te") != b"trailers":
        refusal = RelayError(Reason.INVALID, "the header te must be trailers")
    if refusal is None and seconds == 0:
        refusal = RelayError(Reason.LATE, "the caller's deadline has passed")
    path = fields[b":path"]
    return Call(
        path,
        headers,
        fallback=fallback,
        direct=direct,
        metadata_name=metadata_name,
        seconds=seconds,
        refusal=refusal,
        max_bytes=policy.max_bytes(path) if refusal is None and status is None else None,
        length=content_length(headers),
        encoding=fields.get(b"grpc-encoding", b""),
        http_status=status,
    )


def too_large_call(headers: Headers, reason: str) -> Call:
    """Return a call of which only these headers were read. One that may be gRPC has the status that
    grpc itself gives it, any other 431.
    """
    fields = {b":method": b"POST", b":path": b"", b"content-type": b"application/grpc"}
    fields.update(headers)
    return Call(
        fields[b":path"],
        headers,
        refusal=RelayError(Reason.TOO_LARGE, f"{reason}; send fewer or shorter ones"),
        http_status=HTTP_431 if _http_status(fields) else None,
    )


def _http_status(fields: Mapping[bytes, bytes]) -> int | None:
    """Return the HTTP status that answers a request which is not gRPC; None for gRPC."""
    if fields[b":method"] != b"POST":
        return 405
    return None if _GRPC.match(fields.get(b"content-type", b"")) else 415


def read_answer(headers: Headers) -> Answer:
    """Return what the headers or trailers of a response mean. Raise StreamFault if they are
    malformed.
    """
    check_answer(headers)
    fields = dict(headers)
    status = fields.get(b"grpc-status", b"")
    return Answer(
        encoded(headers),
        int(status) if status.isdigit() and len(status) < 3 else None,  # noqa: PLR2004
        unquote_to_bytes(fields.get(b"grpc-message", b"")[:MAX_TEXT_BYTES]).decode(
            "utf-8", "replace"
        ),
        b":status" in fields,
    )


def find_odd_header(headers: Headers) -> RelayError | None:
    """Return why a call with these headers is refused, None where it is not. Triton and the
    fallback server would answer it INTERNAL, or reset it, though the client is at fault.
    """
    for key, value in headers:
        if key.startswith(b":"):
            continue
        if not _NAME.fullmatch(key):
            return RelayError(Reason.INVALID, f"{_shown(key)} is not a name of metadata")
        if key.endswith(b"-bin") and _decode_base64(value) is None:
            return RelayError(Reason.INVALID, f"the header {_shown(key)} is not base64")
        is_fine = _OWN.get(key)
        if is_fine is not None and not is_fine(value):
            return _not_understood(key.decode(), value)
    return None


def _shown(text: bytes) -> str:
    """Return the start of a caller's text, for an error."""
    return text[:_SHOWN_BYTES].decode("ascii", "backslashreplace")


def _not_understood(key: str, value: bytes) -> RelayError:
    """Return the error of a gRPC header whose value is malformed or unknown."""
    shown = _shown(value)
    if key == "grpc-encoding":
        text = f"grpc-encoding {shown!r}; identity, deflate and gzip are understood"
        return RelayError(Reason.ENCODING, text)
    return RelayError(Reason.INVALID, f"the header {key} cannot be {shown!r}")


def parse_timeout(timeout: bytes) -> float | None:
    """Parse `grpc-timeout`; None where it is malformed."""
    match = _TIMEOUT.fullmatch(timeout)
    return None if match is None else int(match[1]) * _UNITS[match[2]]


def _decode_base64(text: bytes) -> bytes | None:
    """Decode base64 with or without padding; None where grpc would reject it."""
    padded = text + b"=" * (-len(text) % 4)
    try:
        decoded = b64decode(padded, validate=True)
    except Base64Error:
        return None
    return decoded if b64encode(decoded) == padded else None


def _is_number(value: bytes) -> bool:
    """Return whether a header's value is a decimal number below 2^31."""
    return value.isdigit() and len(value) < 11 and int(value) < _NUMBERS_END  # noqa: PLR2004


def _is_timeout(value: bytes) -> bool:
    """Return whether a header's value is a grpc-timeout."""
    return parse_timeout(value) is not None


def _is_cost(value: bytes) -> bool:
    """Return whether the value of lb-cost-bin is the base64 of at least 8 bytes."""
    return len(_decode_base64(value) or b"") >= _COST_BYTES


# headers with a meaning to gRPC itself
_OWN: dict[bytes, Callable[[bytes], bool]] = {
    b"grpc-encoding": ENCODINGS.__contains__,
    b"grpc-internal-encoding-request": ENCODINGS.__contains__,
    b"grpc-previous-rpc-attempts": _is_number,
    b"grpc-retry-pushback-ms": _is_number,
    b"grpc-status": _is_number,
    b"grpc-timeout": _is_timeout,
    b"lb-cost-bin": _is_cost,
}


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """Limits how slowly clients may send and read, in seconds and bytes a second."""

    slow: float = 10  # after this a request must have arrived at `rate` on average
    rate: float = 64 * 2**10
    answer: float = 60  # part of a response must be read within this
    # when its model is unloaded or the adapter stops, a response must be read at `rate`, after this
    drain: float = 2


class RelayContext:
    """Holds the state and the limits that the connections of one listener share."""

    def __init__(
        self,
        policy: RoutingPolicy,
        connect_triton: Connect,  # raises OSError
        connect_fallback: Connect,  # raises OSError
        *,
        timeout_seconds: float,
        max_message_bytes: int,
        budget: ByteBudget,
        # reports a connection that was closed as one too many ("refused") or for a flood of frames
        # ("flood"), and a request beyond the streams of its connection ("streams")
        on_shed: Callable[[str], None] = lambda _: None,
        turns: Turns | None = None,
    ) -> None:
        self.policy = policy
        self.connect_triton = connect_triton
        self.connect_fallback = connect_fallback
        self.timeout_seconds = timeout_seconds
        self.max_message_bytes = max_message_bytes
        self.budget = budget
        self.on_shed = on_shed
        self.turns = turns or Turns()
        self.caller_limits = CallerLimits()
        self.fallback_queue = FallbackQueue()
        self.is_stopping = False  # clients get little more time
        self.calls: HeaderBlockCache[Call] = HeaderBlockCache(partial(read_call, policy))
        self.answers: HeaderBlockCache[Answer] = HeaderBlockCache(read_answer)
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in a task, which the listener waits for as it closes."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task
