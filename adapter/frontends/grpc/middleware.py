"""Wraps every gRPC request: one table of errors, one log line, one count."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar, cast

import grpc

from adapter.core.calls import RPC_NOT_STARTED, RpcMetadata
from adapter.errors import (
    AdapterError,
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
Unary: TypeAlias = Callable[[bytes, Context], Awaitable[bytes]]
Stream: TypeAlias = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]
# More fields of an error's line in the log, if it gets one.
LogFields: TypeAlias = Callable[[], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """The largest messages, in bytes. Of what does not go to Triton directly a gRPC server gathers
    each message whole, so that less is accepted.
    """

    unary: int = 2**22  # a request that is no stream and brings no files
    stream: int = 2**26  # a message of a stream, a load that brings files, and any answer
    direct: int = 2**31 - 1  # a ModelInfer that goes to Triton directly, and its answer

    @classmethod
    def of(cls, size: int | None) -> Self:
        """Return the same limit for all messages, or the defaults for None."""
        return cls() if size is None else cls(size, size, size)


_OF_MESH = "modelmesh"  # the frontend whose calls are all a mesh's
_INFERENCES = frozenset({"ModelInfer", "ModelStreamInfer"})
# codes that are server errors by the semantic conventions
_FAILURES = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
_SERVICES = ("/inference.", "/mmesh.")


def metadata_of(context: Context) -> RpcMetadata:
    """Return the metadata of the client's request."""
    return tuple((key, value) for key, value in context.invocation_metadata() or ())


def ids_of(context: Context) -> dict[str, str]:
    """Return the request's ids, as log fields."""
    return ids_of_metadata(metadata_of(context))


def trailers_of(error: Exception) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of a request that fails with `error`."""
    is_not_started = isinstance(error, AdapterError) and was_not_started(error)
    return ((RPC_NOT_STARTED, "1"),) if is_not_started else ()


class GrpcMiddleware:
    """Makes handlers whose requests and responses are bytes."""

    def __init__(
        self,
        metrics: Metrics,
        frontend: str,
        listener: str | None = None,
        *,
        access: Access | None = None,
    ) -> None:
        """`listener`: if its name is not that of the frontend. `access`: which calls are answered;
        None where no handler is made.
        """
        self._metrics = metrics
        self._frontend = frontend
        self._listener = listener or frontend
        self._access = access
        self._lines = LogLimit(self._listener)

    def served(self, method: str) -> Served:
        return self._metrics.traffic.served(self._frontend, method)

    def unary(self, method: str, act: Unary, max_bytes: int | None = None) -> Handler:
        """`max_bytes` bounds a request after decompression."""
        served = self.served(method)

        async def bounded(request: bytes, context: Context) -> bytes:
            self._check(method, context)
            if max_bytes is not None and len(request) > max_bytes:
                raise MessageTooLarge(f"message larger than max ({len(request)} vs. {max_bytes})")
            return await act(request, context)

        async def handle(request: bytes, context: Context) -> bytes | None:
            return await self._serve(method, served, bounded(request, context), context)

        return grpc.unary_unary_rpc_method_handler(handle)

    def stream(self, method: str, act: Stream) -> Handler:
        served = self.served(method)

        async def checked(requests: AsyncIterator[bytes], context: Context) -> None:
            self._check(method, context)
            # grpc's receiver and its generator refer to each other, and keep the last message
            async with aclosing(cast("AsyncGenerator[bytes, None]", aiter(requests))) as messages:
                await act(messages, context)

        async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
            await self._serve(method, served, checked(requests, context), context)

        return grpc.stream_stream_rpc_method_handler(handle)

    def _check(self, method: str, context: Context) -> None:
        if self._access is not None:
            found = [str(value) for key, value in metadata_of(context) if key == "authorization"]
            self._access.check(RPCS.get(method, CONTROL), found)

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
        fields = {"listener": self._listener, "method": method, "status": status.name}
        log.error("request.failed", exc_info=error, extra=fields)
        drop_tracebacks(error)
        return status, "InternalError: internal error; see the log"

    def note(self, method: str, error: AdapterError, log_fields: LogFields | None = None) -> None:
        """Log and count an error with which a request is answered."""
        level = level_of(error)
        if log.isEnabledFor(level) and self._lines.admits(error, level):
            self._write(level, method, error, log_fields() if log_fields else {})
        if isinstance(error, OutOfMemory) and method in _INFERENCES:
            self._metrics.count_out_of_memory("infer", error.pattern)
        drop_tracebacks(error)

    def _write(
        self, level: int, method: str, error: AdapterError, log_fields: Mapping[str, str]
    ) -> None:
        fields = {
            **log_fields,
            "listener": self._listener,
            "method": method,
            "status": grpc_code(error).name,
            "reason": str(error)[:2000],
            "error": type(error).__name__,
        }
        if error.model_id:
            fields["model_id"] = error.model_id
        log.log(level, "request.failed", extra=fields)

    async def _serve(
        self, method: str, served: Served, work: Awaitable[T], context: Context
    ) -> T | None:
        """Return the answer; end the call with an error's status and return None instead."""
        request, code, waited = CountedRequest(served), grpc.StatusCode.OK, Waited()
        WAITED.set(waited)
        try:
            return await work
        except asyncio.CancelledError:  # the client has left, or its deadline has passed
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.InternalError as error:  # a write to a client that has left
            code = grpc.StatusCode.CANCELLED
            raise asyncio.CancelledError from error
        except Exception as error:  # noqa: BLE001 - it is logged, and the client answered
            is_of_mesh = self._frontend == _OF_MESH or names_model(metadata_of(context))
            ids = partial(ids_of, context)
            code, text = self.status_of(method, error, ids, is_of_mesh=is_of_mesh)
            trailers = trailers_of(error)
        finally:
            request.count(code.name, waited.seconds)
        await _aborted(context, code, text, trailers)
        return None


async def _aborted(
    context: Context, code: grpc.StatusCode, text: str, trailers: RpcMetadata
) -> None:
    """End the call with a status. If nothing was sent yet the answer is HEADERS alone, which a
    proxy can retry; a status that is set goes behind an empty message.
    """
    try:
        await context.abort(code, text, trailers)
    except grpc.aio.AbortError as error:
        # the context refers to it, and its frames to the context
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
        self, code: str, upstream_seconds: float | None = None, now: float | None = None
    ) -> None:
        """Count the response. `now`: time.monotonic, where the caller has just read it."""
        self._served.in_flight.count -= 1
        seconds = (clock.monotonic() if now is None else now) - self._begun
        self._served.count(code, seconds, upstream_seconds, model_id=self.model_id)


class TracedCalls(grpc.aio.ServerInterceptor):
    """Makes a server span for each call."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not method.startswith(_SERVICES):
            return handler
        metadata = handler_call_details.invocation_metadata or ()
        if handler.request_streaming:  # all of ours are of one of two kinds, and of bytes
            act = self._traced(method.removeprefix("/"), metadata, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(act)
        act = self._traced(method.removeprefix("/"), metadata, handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(act)

    def _traced(self, method: str, metadata: Sequence[tuple[str, str | bytes]], act: Any) -> Any:
        async def with_span(given: bytes | AsyncIterator[bytes], context: Context) -> Any:
            headers = {key: value for key, value in metadata if isinstance(value, str)}
            with self._tracing.server(method, headers) as span:
                span.set_attribute("rpc.system.name", "grpc")
                span.set_attribute("rpc.method", method)
                try:
                    return await act(given, context)
                finally:
                    code = _code(context)
                    span.set_attribute("rpc.response.status_code", code)
                    if code in _FAILURES:
                        self._tracing.failed(span, code)

        return with_span


def _code(context: Context) -> str:
    code = context.code() or grpc.StatusCode.OK
    return str(getattr(code, "name", code))
