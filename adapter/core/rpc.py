"""One call of Triton's gRPC service as a frontend hands it to a data plane: bytes, no tensors."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from adapter.core.infer import Hold

RpcMetadata: TypeAlias = Sequence[tuple[str, str | bytes]]
ChannelOptions: TypeAlias = tuple[tuple[str, int], ...]


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
