"""One shape for the gRPC calls that this process answers: access, errors, log lines, counts, spans.

Calls that the relay sends to Triton directly are counted, and their errors worded, here as well.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar

import grpc

from adapter.core.calls import RPC_NOT_STARTED, RpcMetadata
from adapter.errors import (
    AdapterError,
    BackendUnavailable,
    MessageTooLarge,
    OutOfMemory,
    drop_tracebacks,
    was_not_started,
)
from adapter.frontends.access import Access
from adapter.frontends.grpc.messages import names_model
from adapter.frontends.routes import CONTROL, RPCS
from adapter.frontends.status import grpc_code, grpc_status, level_of
from adapter.runtime import clock
from adapter.telemetry.log import LogLimit, ids_of_metadata
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.tracing import Tracing
from adapter.telemetry.traffic import WAITED, Served, Waited

log = logging.getLogger(__name__)
T = TypeVar("T")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Unary: TypeAlias = "Callable[[GrpcCall], Awaitable[bytes]]"
# reads the messages of its stream by `context.read`
Stream: TypeAlias = "Callable[[GrpcCall], Awaitable[None]]"
# returns more fields of an error's line in the log, if the error gets one
LogFields: TypeAlias = Callable[[], Mapping[str, str]]

LOAD = "RepositoryModelLoad"
_OF_MESH = "modelmesh"  # the frontend whose calls are all a mesh's
_INFERENCES = frozenset({"ModelInfer", "ModelStreamInfer"})
# codes that are server errors by the semantic conventions
_FAILURES = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """The largest messages, in bytes. Of what does not go to Triton directly a gRPC server gathers
    each message whole, so that less is accepted.
    """

    unary: int = 2**22  # a request that is no stream and brings no files
    stream: int = 2**26  # a message of a stream, a load that brings files, and any answer
    direct: int = 2**31 - 1  # a ModelInfer that goes to Triton directly, and its answer

    @classmethod
    def within(cls, size: int) -> Self:
        """Return the limits, none of them above `size`."""
        usual = cls()
        return cls(min(usual.unary, size), min(usual.stream, size), min(usual.direct, size))


class GrpcCall:
    """One call of a client, as the functions that answer calls get it."""

    def __init__(
        self,
        calls: "GrpcCalls",
        method: str,
        context: Context,
        message: bytes = b"",  # empty for a stream
    ) -> None:
        self._calls = calls
        self.method = method
        self.context = context
        self.message = message
        self.code = grpc.StatusCode.OK
        self.metadata: RpcMetadata = tuple(context.invocation_metadata() or ())

    def read_ids(self) -> dict[str, str]:
        """Return the ids of the request, as log fields."""
        return ids_of_metadata(self.metadata)

    def note(self, error: AdapterError) -> None:
        """Log and count an error that is an answer of a stream, which continues."""
        self._calls.note(self.method, error, self.read_ids)


class GrpcCalls:
    """Answers the calls of one frontend at a listener."""

    def __init__(
        self,
        metrics: Metrics,
        access: Access,  # the rights of the callers of the listener
        limits: MessageLimits,
        *,
        frontend: str | None = None,  # None where its name is that of the listener
        tracing: Tracing | None = None,
    ) -> None:
        self._metrics = metrics
        self._access = access
        self.limits = limits
        self._frontend = frontend or access.name
        self._tracing = tracing
        self._lines = LogLimit(access.name)

    def served(self, method: str) -> Served:
        """Return the counts of a method."""
        return self._metrics.traffic.served(self._frontend, method)

    def service(
        self, name: str, unary: Mapping[str, Unary], streams: Mapping[str, Stream] | None = None
    ) -> grpc.GenericRpcHandler:
        """Return what answers the methods of a service."""
        handlers = {method: self._unary(name, method, act) for method, act in unary.items()}
        for method, act in (streams or {}).items():
            handlers[method] = self._stream(name, method, act)
        return grpc.method_handlers_generic_handler(name, handlers)

    def _unary(self, service: str, method: str, act: Unary) -> Handler:
        """Return the handler of a method with one request and one answer, for grpc."""
        served = self.served(method)

        async def handle(message: bytes, context: Context) -> bytes | None:
            call = GrpcCall(self, method, context, message)
            return await self._answer(service, call, served, partial(act, call))

        return grpc.unary_unary_rpc_method_handler(handle)

    def _stream(self, service: str, method: str, act: Stream) -> Handler:
        """Return the handler of a method with a stream of requests and answers, for grpc."""
        served = self.served(method)

        # grpc's own iterator keeps each message until the next one comes: it is left alone
        async def handle(_: AsyncIterator[bytes], context: Context) -> None:
            call = GrpcCall(self, method, context)
            await self._answer(service, call, served, partial(act, call))

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _answer(
        self, service: str, call: GrpcCall, served: Served, act: Callable[[], Awaitable[T]]
    ) -> T | None:
        """Run `act` with all that belongs to a call: span, access check, count and log. Return its
        answer; end the call with an error's status and return None instead.
        """
        request = CountedRequest(served)
        waited = Waited()
        WAITED.set(waited)
        with self._open_span(service, call):
            try:
                self._check_access(call)
                return await _refuse_cancelled_work(act)
            except asyncio.CancelledError:  # the client has left, or its deadline has passed
                call.code = grpc.StatusCode.CANCELLED
                raise
            except grpc.aio.InternalError as error:  # a write to a client that has left
                call.code = grpc.StatusCode.CANCELLED
                raise asyncio.CancelledError from error
            except Exception as error:  # noqa: BLE001 - it is logged, and the client answered
                is_of_mesh = self._frontend == _OF_MESH or names_model(call.metadata)
                call.code, text = self.status_of(
                    call.method, error, call.read_ids, is_of_mesh=is_of_mesh
                )
                trailers = trailers_of(error)
            finally:
                request.count(call.code.name, waited.seconds)
        await _abort(call, text, trailers)
        return None

    def _check_access(self, call: GrpcCall) -> None:
        """Raise an error for a call that lacks the token of its method, or whose message is too
        large.
        """
        tokens = [str(value) for key, value in call.metadata if key == "authorization"]
        self._access.check(RPCS.get(call.method, CONTROL), tokens)
        size = len(call.message)  # after decompression
        limit = self.limits.unary
        if size > limit and call.method != LOAD:
            raise MessageTooLarge(f"message larger than max ({size} vs. {limit})")

    @contextmanager
    def _open_span(self, service: str, call: GrpcCall) -> Iterator[None]:
        """Trace what runs within as a server span, if traces are exported."""
        if self._tracing is None:
            yield
            return
        name = f"{service}/{call.method}"
        headers = {key: value for key, value in call.metadata if isinstance(value, str)}
        with self._tracing.server(name, headers) as span:
            span.set_attribute("rpc.system.name", "grpc")
            span.set_attribute("rpc.method", name)
            try:
                yield
            finally:
                code = call.code.name
                span.set_attribute("rpc.response.status_code", code)
                if code in _FAILURES:
                    self._tracing.failed(span, code)

    def status_of(
        self,
        method: str,
        error: Exception,
        log_fields: LogFields | None = None,
        *,
        is_of_mesh: bool = False,
    ) -> tuple[grpc.StatusCode, str]:
        """Log and count an error; return the status and the text for the client. What is no
        AdapterError is a bug, whose text stays in the log.
        """
        if isinstance(error, AdapterError):
            self.note(method, error, log_fields)
            return grpc_status(error, is_of_mesh=is_of_mesh)
        status = grpc.StatusCode.INTERNAL
        fields = {"listener": self._access.name, "method": method, "status": status.name}
        log.error("request.failed", exc_info=error, extra=fields)
        drop_tracebacks(error)
        return status, "InternalError: internal error; see the log"

    def note(self, method: str, error: AdapterError, log_fields: LogFields | None = None) -> None:
        """Log and count an error with which a request is answered."""
        level = level_of(error)
        if log.isEnabledFor(level) and self._lines.admits(error, level):
            self._write_log(level, method, error, log_fields() if log_fields else {})
        if isinstance(error, OutOfMemory) and method in _INFERENCES:
            self._metrics.count_out_of_memory("infer", error.pattern)
        drop_tracebacks(error)

    def _write_log(
        self, level: int, method: str, error: AdapterError, log_fields: Mapping[str, str]
    ) -> None:
        """Log a call that failed, as request.failed."""
        fields = {
            **log_fields,
            "listener": self._access.name,
            "method": method,
            "status": grpc_code(error).name,
            "reason": str(error)[:2000],
            "error": type(error).__name__,
        }
        if error.model_id:
            fields["model_id"] = error.model_id
        log.log(level, "request.failed", extra=fields)


async def _refuse_cancelled_work(act: Callable[[], Awaitable[T]]) -> T:
    """Return what `act` returns. Raise BackendUnavailable if something that it waited for was
    cancelled: gRPC cancels the task of a call whose client has left, and answers nothing when a
    task ends so for another reason; the client would wait until its deadline.
    """
    try:
        return await act()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        text = "what this call waited for was cancelled; try again"
        raise BackendUnavailable(text, delivered=True) from error


def trailers_of(error: Exception) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of a request that fails with `error`."""
    is_not_started = isinstance(error, AdapterError) and was_not_started(error)
    return ((RPC_NOT_STARTED, "1"),) if is_not_started else ()


async def _abort(call: GrpcCall, text: str, trailers: RpcMetadata) -> None:
    """End the call with its code. If nothing was sent yet the answer is HEADERS alone, which a
    proxy can retry; a status that is set goes behind an empty message.
    """
    try:
        await call.context.abort(call.code, text, trailers)
    except grpc.aio.AbortError as error:
        # drop the traceback: the context refers to the error, and the frames to the context
        error.__traceback__ = None
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


class CountedRequest:
    """One request: in flight until it is counted with the code of its response."""

    __slots__ = ("_begun", "_served", "model_id")

    def __init__(self, served: Served) -> None:
        self._served = served
        self.model_id: str | None = None
        served.in_flight.count += 1
        self._begun = clock.monotonic()

    def count(
        self,
        code: str,
        upstream_seconds: float | None = None,
        now: float | None = None,  # time.monotonic, where the caller has just read it
    ) -> None:
        """Count the response with its code and duration; the request is in flight no longer."""
        self._served.in_flight.count -= 1
        seconds = (clock.monotonic() if now is None else now) - self._begun
        self._served.count(code, seconds, upstream_seconds, model_id=self.model_id)
