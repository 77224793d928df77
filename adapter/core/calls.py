"""Calls from a frontend to a data plane, over HTTP and gRPC: bytes in, bytes out, no tensors."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord
from adapter.errors import AdapterError

RawHeaders: TypeAlias = list[tuple[bytes, bytes]]
RpcMetadata: TypeAlias = Sequence[tuple[str, str | bytes]]
ChannelOptions: TypeAlias = tuple[tuple[str, int], ...]


class Hold(Protocol):
    """What keeps a model in place while Triton works on a call of it (control/lease.py).

    A data plane whose caller leaves before Triton is done calls `abandon`, and `end` when it is.
    """

    @property
    def record(self) -> ModelRecord | None: ...
    def abandon(self) -> None: ...
    def end(self, error: BaseException | None = None) -> BaseException | None: ...


@dataclass(frozen=True, slots=True)
class V2Call:
    """A call of Triton's V2 REST, passed on as it is. `path` stands behind /v2, in Triton's names.
    `body` is whole when small, else a stream, whose length is among the `headers` if it is known.

    `is_probe`: any status is an answer. `is_stream`: it may last for ever, so that the time limit
    is one for each piece of the answer.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | AsyncIterator[bytes] | None = None
    is_probe: bool = False
    is_stream: bool = False


class V2Answer(Protocol):
    """A good answer, not read yet. Read it once, whole or in chunks.

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
        """Whatever is no good answer is raised as one of our errors. `hold` is of the model that
        the call is about, if it is about one; who leaves early leaves it to Triton.
        """


class Upstream(Protocol):
    """A connection to Triton during one call, which is told of by callbacks; see Receiver.

    `begin`, then `send`, or `write` and at its end `sent`. Who does not want the answer any more,
    or was told that the call failed, calls `leave`.
    """

    headers: RawHeaders
    length: int | None

    def begin(self, receiver: "Receiver", record: ModelRecord | None) -> None: ...
    def send(self, head: bytes, body: bytes) -> None: ...
    def write(self, piece: bytes) -> None: ...
    def sent(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def leave(self, receiver: "Receiver", hold: Hold | None) -> None: ...
    def abort(self) -> None: ...


class Receiver(Protocol):
    """Is told of one call. Of a good answer: `answered` when its headers are there, and its length
    if that is known; `received` for each piece; `ended`. Or, where all of it came at once,
    `answered_whole` alone. Or at any time `failed`, and nothing more. `pause_writing` and
    `resume_writing`: how fast Triton takes the request.
    """

    def answered(self) -> None: ...
    def received(self, piece: bytes) -> None: ...
    def ended(self) -> None: ...
    def answered_whole(self, body: bytes) -> None: ...
    def failed(self, error: AdapterError) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Check(Protocol):
    """InvalidRequest where the body that is fed, piece by piece, would end Triton."""

    def feed(self, piece: bytes) -> None: ...


class FastDataPlane(Protocol):
    """The way of a call without a task. `host` is empty until Triton is up, and only then an
    upstream can be had. `json_bytes`: how much of a body is JSON, None for all; `length` of all.
    """

    host: str

    def idle(self) -> Upstream | None: ...
    async def connected(self, model_id: ModelId) -> Upstream: ...
    def check(self, body: bytes, json_bytes: int | None) -> None: ...
    def checking(self, json_bytes: int | None, length: int) -> Check: ...


# -- gRPC ------------------------------------------------------------------------------------


def keepalive(*, seconds: float, answer_seconds: float) -> ChannelOptions:
    """Options of a grpc channel whose connection ends when the host at its other end is gone.

    While a call is open and nothing has come for `seconds`, a ping is sent; what is not answered
    within `answer_seconds`, a ping or sent bytes (TCP_USER_TIMEOUT), ends the connection.
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
    """`method` of inference.GRPCInferenceService. `seconds` are left until the caller's deadline,
    None when it set none.
    """

    method: str
    metadata: RpcMetadata
    seconds: float | None


@dataclass(frozen=True, slots=True)
class RpcAnswer:
    message: bytes
    initial_metadata: RpcMetadata
    trailing_metadata: RpcMetadata


class RpcStream(Protocol):
    """An open stream. One task may write while another reads."""

    async def write(self, message: bytes) -> None: ...
    async def done_writing(self) -> None: ...
    def messages(self) -> AsyncIterator[bytes]: ...


class RpcDataPlane(Protocol):
    """Whatever is no good answer is raised as one of our errors.

    `hold` is of the model that the call is about, if it is about one.
    """

    async def call(self, call: RpcCall, message: bytes, hold: Hold | None) -> RpcAnswer:
        """Who leaves early, or has no answer in time, leaves it to Triton, which is not told."""

    def stream(self, call: RpcCall, hold: Hold) -> AbstractAsyncContextManager[RpcStream]:
        """`hold` is of all models of the stream. Who leaves the context early leaves the stream to
        Triton: nothing more is written to it, and its answers are read for nobody.
        """
