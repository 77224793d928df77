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
    """Keeps a model loaded while Triton works on a call of it (control/lease.py).

    A data plane whose caller leaves before Triton is done calls `abandon`, and `end` once it is.
    """

    @property
    def record(self) -> ServedModel | None: ...
    def abandon(self) -> None: ...
    def end(self, error: BaseException | None = None) -> BaseException | None: ...


@dataclass(frozen=True, slots=True)
class V2Call:
    """A call of Triton's V2 REST API, passed on unchanged. `path` follows /v2, in Triton's names.
    `body` is whole when small, else a stream whose length, if known, is among the `headers`.

    `is_probe`: any status is an answer. `is_restricted`: an embedded Triton takes the call from the
    adapter alone. `is_stream`: the answer may never end, so the time limit applies to each piece of
    it. `on_cut`: as in RpcCall. `shares_memory`: an inference may name regions of shared memory.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | AsyncIterator[bytes] | None = None
    is_probe: bool = False
    is_restricted: bool = False
    is_stream: bool = False
    on_cut: Callable[[], None] = _nothing
    shares_memory: bool = False


class V2Answer(Protocol):
    """A successful answer whose body is not read yet. Read it once, whole or in chunks.

    `json_header_bytes` is how much of the body is JSON, the rest being raw tensors; None when all
    of it is JSON (the binary tensor extension of V2).
    """

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content_length(self) -> int | None: ...
    @property
    def json_header_bytes(self) -> int | None: ...
    async def read(self) -> bytes: ...
    def chunks(self) -> AsyncIterator[bytes]: ...


class V2DataPlane(Protocol):
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

    def begin(self, receiver: "Receiver", record: ServedModel | None) -> None: ...
    def send(self, head: bytes, body: bytes) -> None: ...
    def write(self, piece: bytes) -> None: ...
    def sent(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def leave(self, receiver: "Receiver", hold: Hold | None) -> None: ...
    def abort(self) -> None: ...


class Receiver(Protocol):
    """Receives the events of one call.

    For a successful answer: `answered` once its headers are there, and its length if known,
    `received` for each piece, then `ended`; or `answered_whole` alone if all came at once. Or at
    any time `failed`, and nothing more. `pause_writing` and `resume_writing` pass on Triton's
    backpressure.
    """

    def answered(self) -> None: ...
    def received(self, piece: bytes) -> None: ...
    def ended(self) -> None: ...
    def answered_whole(self, body: bytes) -> None: ...
    def failed(self, error: AdapterError) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Check(Protocol):
    """Checks a body piece by piece; raises InvalidRequest for one that would crash Triton."""

    def feed(self, piece: bytes) -> None: ...


class FastDataPlane(Protocol):
    """Makes calls by callbacks, without a task. `host` is empty until Triton is up; upstreams are
    available only then. `json_bytes`: how much of a body is JSON, None for all; `length`: of all.
    """

    host: str

    def idle(self) -> Upstream | None: ...
    async def connected(self, model_id: ModelId) -> Upstream: ...
    def check(
        self, body: bytes, json_bytes: int | None, record: ServedModel, *, shares_memory: bool
    ) -> None: ...
    def checking(
        self, json_bytes: int | None, length: int, record: ServedModel, *, shares_memory: bool
    ) -> Check: ...
    def check_packed(
        self, body: bytes, json_bytes: int | None, record: ServedModel, *, shares_memory: bool
    ) -> bool:
        """Check a compressed body if it is small once it is unpacked; return whether it is."""

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
        ("grpc.http2.ping_timeout_ms", round(answer_seconds * 1000)),  # else a minute
        # else two pings are all that is sent before the next call
        ("grpc.http2.max_pings_without_data", 0),
    )


@dataclass(frozen=True, slots=True)
class RpcCall:
    """A call of `method` of inference.GRPCInferenceService. `seconds` are left until the caller's
    deadline, None without one. `on_cut` is called when the answers of a stream are dropped, as its
    caller does not take them: what waits for that caller is to end.
    """

    method: str
    metadata: RpcMetadata
    seconds: float | None
    on_cut: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class RpcAnswer:
    message: bytes
    initial_metadata: RpcMetadata
    trailing_metadata: RpcMetadata


class RpcStream(Protocol):
    """An open stream. One task may write while another reads."""

    async def write(self, message: bytes, request_id: bytes = b"") -> None: ...
    async def done_writing(self) -> None: ...
    def messages(self) -> AsyncIterator[bytes]: ...


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
