"""The edge of the gRPC doors: every error goes through one table, every call is counted."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import grpc

from adapter.core.calls import RpcMetadata
from adapter.errors import AdapterError, MessageTooLarge, NotPassedThrough, OutOfMemory, was_refused
from adapter.frontends.status import grpc_status
from adapter.telemetry import request_ids
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.traffic import Served
from adapter.telemetry.waiting import WAITED, Waited

log = logging.getLogger(__name__)
T = TypeVar("T")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Unary: TypeAlias = Callable[[bytes, Context], Awaitable[bytes]]
Stream: TypeAlias = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]

_INFERENCES = frozenset({"ModelInfer", "ModelStreamInfer"})


def metadata_of(context: Context) -> RpcMetadata:
    """What came with the caller's request."""
    return tuple((key, value) for key, value in context.invocation_metadata() or ())


def ids_of(context: Context) -> dict[str, str]:
    """For the log."""
    return request_ids.of_metadata(metadata_of(context))


class GrpcMiddleware:
    """Makes handlers that take and give bytes as they are."""

    def __init__(self, metrics: Metrics, frontend: str) -> None:
        self._metrics = metrics
        self._frontend = frontend

    def unary(self, method: str, act: Unary, max_bytes: int | None = None) -> Handler:
        """`max_bytes`: of a request, unpacked."""
        served = self._metrics.traffic.served(self._frontend, method)

        async def bounded(request: bytes, context: Context) -> bytes:
            if max_bytes is not None and len(request) > max_bytes:
                raise MessageTooLarge(f"message larger than max ({len(request)} vs. {max_bytes})")
            return await act(request, context)

        async def handle(request: bytes, context: Context) -> bytes:
            return await self._watched(method, served, bounded(request, context), context)

        return grpc.unary_unary_rpc_method_handler(handle)

    def stream(self, method: str, act: Stream) -> Handler:
        served = self._metrics.traffic.served(self._frontend, method)

        async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
            await self._watched(method, served, act(requests, context), context)

        return grpc.stream_stream_rpc_method_handler(handle)

    def denied(self, method: str, why: str) -> Handler:
        """For what the setting `passthrough` does not open."""
        served = self._metrics.traffic.served(self._frontend, method)

        async def handle(_: bytes, context: Context) -> None:
            self.note(method, NotPassedThrough(why), ids_of(context))
            served.count("PERMISSION_DENIED", 0.0)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"NotPassedThrough: {why}")

        return grpc.unary_unary_rpc_method_handler(handle)

    def note(self, method: str, error: AdapterError, seen: Mapping[str, str] | None = None) -> None:
        """Log and count an error that a caller is told. `seen`: fields for the log."""
        level = logging.INFO if was_refused(error) else logging.WARNING
        reason = str(error)[:2000]
        fields = {**(seen or {}), "method": method, "reason": reason, "error": type(error).__name__}
        if error.model_id:
            fields["model_id"] = error.model_id
        log.log(level, "request.failed", extra=fields)
        if isinstance(error, OutOfMemory) and method in _INFERENCES:
            self._metrics.out_of_memory.labels("infer", error.pattern or "").inc()

    async def _watched(
        self, method: str, served: Served, work: Awaitable[T], context: Context
    ) -> T:
        begun, code, waited = time.monotonic(), grpc.StatusCode.OK, Waited()
        WAITED.set(waited)
        served.in_flight.begin()
        try:
            return await work
        except AdapterError as error:
            self.note(method, error, ids_of(context))
            code, text = grpc_status(error)
            return await context.abort(code, text)
        except asyncio.CancelledError:  # the caller has gone, or its deadline has passed
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.InternalError as error:  # so has one to whom nothing can be written
            code = grpc.StatusCode.CANCELLED
            raise asyncio.CancelledError from error
        except Exception:
            log.exception("request.failed", extra={"method": method})
            code = grpc.StatusCode.INTERNAL
            return await context.abort(code, "InternalError: internal error; see the log")
        finally:
            served.in_flight.end()
            served.count(code.name, time.monotonic() - begun, waited.seconds)
