"""The interface between frontends and data planes, for HTTP and gRPC: bytes, no tensors."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from adapter.core.model import ModelId, TritonName
from adapter.core.triton_input import Unclassified
from adapter.errors import AdapterError

RawHeaders: TypeAlias = list[tuple[bytes, bytes]]
RpcMetadata: TypeAlias = Sequence[tuple[str, str | bytes]]
ChannelOptions: TypeAlias = tuple[tuple[str, int], ...]

# The header of an error answer to a request of which Triton had nothing, over HTTP and over gRPC.
NOT_STARTED = "X-Triton-Adapter-Not-Started"
RPC_NOT_STARTED = NOT_STARTED.lower()


# A longer request target, name or value of a header makes Triton 2.51 close the connection.
MAX_LINE_BYTES = 8189


def has_long_line(head: bytes) -> bool:
    """Return whether Triton may refuse to read a line of this head."""
    return len(head) > MAX_LINE_BYTES and max(map(len, head.split(b"\r\n"))) > MAX_LINE_BYTES


def _nothing() -> None: ...


class ServedModel(Protocol):
    """Describes a loaded model, as far as data planes need it."""

    is_decoupled: bool | None  # a request may have any number of answers; None until asked

    @property
    def name(self) -> TritonName:
        """Return the name in Triton."""

    @property
    def asked_for(self) -> ModelId:
        """Return the name that answers carry: the one that callers use."""

    @property
    def unclassified(self) -> Unclassified | None:
        """Return the outputs whose `classification` ends Triton; None where it does not tell."""


class Hold(Protocol):
    """Keeps a model loaded while Triton works on a call of it (control/leases.py).

    A data plane whose caller leaves before Triton is done calls `abandon`, and `end` once it is.
    """

    @property
    def record(self) -> ServedModel | None:
        """Return the model; None for a call about no model that Triton has."""

    def abandon(self) -> None:
        """Note that the caller has left and Triton has not: an unload still waits for the call."""

    def end(self, error: BaseException | None = None) -> BaseException | None:
        """Let the model go. Return the error to send, which may be another one than `error`."""


@dataclass(frozen=True, slots=True)
class V2Call:
    """Describes a call of Triton's V2 REST API, which is passed on unchanged."""

    method: str
    path: str  # the part behind /v2, in Triton's names
    headers: Mapping[str, str]
    # whole if it is small, else a stream; its length is among the headers if it is known
    body: bytes | AsyncIterator[bytes] | None = None
    is_probe: bool = False  # any status is an answer
    is_restricted: bool = False  # an embedded Triton takes the call from the adapter alone
    is_stream: bool = False  # the answer may never end, so each piece of it has the time limit
    on_cut: Callable[[], None] = _nothing  # as in RpcCall
    shares_memory: bool = False  # an inference may name regions of shared memory


class V2Answer(Protocol):
    """A successful answer whose body is not read yet. Read it once, whole or in chunks."""

    @property
    def status(self) -> int:
        """Return the status of HTTP."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers as Triton has sent them."""

    @property
    def content_length(self) -> int | None:
        """Return the length of the body; None if it comes in chunks."""

    @property
    def json_header_bytes(self) -> int | None:
        """Return how much of the body is JSON, with raw tensors behind it (the binary tensor
        extension of V2); None if all of it is JSON.
        """

    async def read(self) -> bytes:
        """Return the whole body."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises the AdapterError that breaks it off."""


class V2DataPlane(Protocol):
    """Forwards calls of the V2 REST API to Triton."""

    def forward(self, call: V2Call, hold: Hold | None) -> AbstractAsyncContextManager[V2Answer]:
        """Forward the call; an unsuccessful answer is raised as an AdapterError.

        `hold` is of the call's model, if it has one. It is abandoned if the context is left early.
        """


class Upstream(Protocol):
    """A connection to Triton during one call, which reports by callbacks to a Receiver.

    Call `begin`, then `send`, or `write` and finally `sent`. Call `leave` to give up the answer,
    and after `failed`.
    """

    headers: RawHeaders
    length: int | None

    def begin(self, receiver: "Receiver", record: ServedModel | None) -> None:
        """Begin a call, whose events `receiver` gets."""

    def send(self, head: bytes, body: bytes) -> None:
        """Send the head of a request, and its whole body."""

    def write(self, piece: bytes) -> None:
        """Send a part of a request."""

    def sent(self) -> None:
        """Note that all of the request is sent."""

    def pause_reading(self) -> None:
        """Read no more of the answer for now, since the client is slow."""

    def resume_reading(self) -> None:
        """Read on."""

    def leave(self, receiver: "Receiver", hold: Hold | None) -> None:
        """Give up the answer, or return the connection of a call that has failed."""


class Receiver(Protocol):
    """Receives the events of one call.

    For a successful answer: `answered` once its headers are there, and its length if known,
    `received` for each piece, then `ended`; or `answered_whole` alone if all came at once. Or at
    any time `failed`, and nothing more. `pause_writing` and `resume_writing` pass on Triton's
    backpressure.
    """

    def answered(self) -> None:
        """Begin the answer: the upstream has its headers."""

    def received(self, piece: bytes) -> None:
        """Pass on a piece of the answer."""

    def ended(self) -> None:
        """End the answer."""

    def answered_whole(self, body: bytes) -> None:
        """Pass on an answer that came at once."""

    def failed(self, error: AdapterError) -> None:
        """Answer with an error."""

    def pause_writing(self) -> None:
        """Write no more of the request for now, since Triton is slow."""

    def resume_writing(self) -> None:
        """Write on."""


class Check(Protocol):
    """Checks a body piece by piece; raises InvalidRequest for one that would crash Triton."""

    def feed(self, piece: bytes) -> None:
        """Check the next piece."""


class FastDataPlane(Protocol):
    """Makes calls by callbacks, without a task.

    Everywhere, `json_bytes` is how much of a body is JSON; None if all of it is.
    """

    host: str  # empty until Triton is up; upstreams are available only then

    def take_idle(self) -> Upstream | None:
        """Take an open connection that no call has; None if there is none."""

    async def connected(self, model_id: ModelId) -> Upstream:
        """Return a connection for a call of this model; open one if all are in use."""

    def compose_head(self, call: V2Call) -> bytes:
        """Return the head of a call as Triton gets it. Raises InvalidRequest for headers that it
        must not get.
        """

    def check(
        self,
        body: bytes,
        json_bytes: int | None,
        record: ServedModel,
        *,
        is_packed: bool,
        shares_memory: bool,
    ) -> bool:
        """Check a whole body if that takes little time; return whether it was checked. Raise
        InvalidRequest for one that would crash Triton.
        """

    def checking(
        self, json_bytes: int | None, length: int, record: ServedModel, *, shares_memory: bool
    ) -> Check:
        """Return a check for the pieces of a body of this length."""

    async def check_in_turns(
        self,
        body: bytes,
        json_bytes: int | None,
        record: ServedModel,
        *,
        is_packed: bool,
        shares_memory: bool,
    ) -> None:
        """Check a large body, also a compressed one, while others have their turns."""


# -- gRPC ------------------------------------------------------------------------------------


def keepalive(*, seconds: float, answer_seconds: float) -> ChannelOptions:
    """Return options of a grpc channel whose connection ends when the peer host is gone.

    While a call is open and nothing has arrived for `seconds`, a ping is sent. A ping or sent bytes
    (TCP_USER_TIMEOUT) without an acknowledgement in `answer_seconds` end the connection.
    """
    return (
        ("grpc.keepalive_time_ms", round(seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(answer_seconds * 1000)),
        ("grpc.http2.ping_timeout_ms", round(answer_seconds * 1000)),  # the default is 60 s
        # the default is 2: grpc would send no third ping before the next call
        ("grpc.http2.max_pings_without_data", 0),
    )


@dataclass(frozen=True, slots=True)
class RpcCall:
    """Describes a call of Triton over gRPC."""

    method: str  # of inference.GRPCInferenceService
    metadata: RpcMetadata
    seconds: float | None  # until the caller's deadline; None without one
    # called when the answers of a stream are dropped because its caller does not read them: what
    # waits for that caller is to end
    on_cut: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class RpcAnswer:
    """Holds Triton's answer to a call over gRPC."""

    message: bytes
    initial_metadata: RpcMetadata
    trailing_metadata: RpcMetadata


class RpcStream(Protocol):
    """An open stream. One task may write while another reads."""

    async def write(self, message: bytes, request_id: bytes = b"") -> None:
        """Send a message, when Triton is ready for it."""

    async def done_writing(self) -> None:
        """Tell Triton that no more messages come."""

    def messages(self) -> AsyncIterator[bytes]:
        """Yield the answers as they come."""


class RpcDataPlane(Protocol):
    """Calls Triton over gRPC; a failed call is raised as an AdapterError.

    `hold` is of the call's model, if it has one.
    """

    async def call(self, call: RpcCall, message: bytes, hold: Hold | None) -> RpcAnswer:
        """Return the answer. A call that is cancelled or late goes on in Triton, unread."""

    def stream(self, call: RpcCall, hold: Hold) -> AbstractAsyncContextManager[RpcStream]:
        """Open a stream for inferences of the model that `hold` is of. If the context is left
        early, nothing more is written to it, and its remaining answers are read and dropped.
        """
