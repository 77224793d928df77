"""Wraps what aiohttp serves: JSON answers, errors through one table, counts."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

from aiohttp import ClientError, web

from adapter.core.model import parse_model_id
from adapter.errors import (
    AdapterError,
    BrokenBody,
    InvalidRequest,
    MethodNotAllowed,
    NotPassedThrough,
    PayloadTooLarge,
)
from adapter.frontends.access import Access, SitePolicy
from adapter.frontends.bodies import HeldBody
from adapter.frontends.http.application import application_of
from adapter.frontends.http.instrumentation import (
    PHRASES,
    Asked,
    Instrumentation,
    Refusal,
    contract_of,
    echoed_headers,
    encoded,
    own_refusal,
    path_segments,
)
from adapter.frontends.routes import Match, Route, bare, find
from adapter.runtime import clock
from adapter.runtime.byte_budget import ByteBudget
from adapter.telemetry.log import ids_of_headers
from adapter.telemetry.tracing import MODEL, Tracing
from adapter.telemetry.traffic import WAITED, Waited

log = logging.getLogger(__name__)

# The largest body of a load or another control call; loads that bring files may have more.
CONTROL_BODY_BYTES = 2**20

Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def answer(body: Mapping[str, Any] | list[Any], status: int = 200) -> web.Response:
    text = encoded(json.dumps(body))
    return web.Response(status=status, body=text, content_type="application/json")


def method_not_allowed(request: web.BaseRequest, methods: Iterable[str]) -> MethodNotAllowed:
    allowed = ", ".join(f"{one}, HEAD" if one == "GET" else one for one in methods)
    text = f"{request.method} is not allowed here; allowed: {allowed}"
    return MethodNotAllowed(text, allowed=allowed)


def asked_by(request: web.BaseRequest) -> Asked:
    return lambda: (request.method, request.raw_path, request.headers)


def ids_of(request: web.BaseRequest) -> dict[str, str]:
    """Return the fields of the log line."""
    return ids_of_headers(request.headers)


def _answered(refusal: Refusal) -> web.Response:
    response = web.Response(
        status=refusal.status,
        reason=PHRASES[refusal.status],
        headers=refusal.headers,
        body=encoded(refusal.body),
    )
    response.content_type = "application/json"
    return response


class Calls:
    """Has each call answered by the handler of its route. `passthrough`: the items of that setting.
    `handlers`: by contract and operation.
    """

    def __init__(
        self,
        access: Access,
        handlers: Mapping[str, Mapping[str, Serve]],
        passthrough: Collection[str] = (),
    ) -> None:
        self._access = access
        self._handlers = handlers
        self._passthrough = passthrough

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        match = find(bare(path_segments(request.raw_path)))
        if match is None:
            raise InvalidRequest(f"unknown path {request.raw_path[:200]!r}")
        request["route"] = match.path
        note_model(request, match)
        # HEAD is GET without the body
        route = match.methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            self._check_open(next(iter(match.methods.values())))
            raise method_not_allowed(request, match.methods)
        return await self.answer(request, match, route)

    async def answer(
        self, request: web.BaseRequest, match: Match, route: Route
    ) -> web.StreamResponse:
        request["match"] = match
        request["frontend"], request["operation"] = route.contract, route.operation
        self._access.check(route.scope, request.headers.getall("Authorization", ()))
        self._check_open(route)
        return await self._handlers[route.contract][route.operation](request)

    def _check_open(self, route: Route) -> None:
        needed = route.passthrough
        if needed is not None and needed not in self._passthrough:
            text = "this call is not forwarded to Triton: the setting passthrough lacks"
            raise NotPassedThrough(
                f"{text} {needed!r}; see docs/v2.md#calls-about-the-whole-server"
            )


def note_model(request: web.BaseRequest, match: Match) -> None:
    """Note the model that the path names; InvalidRequest for a name that none can have."""
    if (name := match.names.get("model_name")) is not None:
        request["model_id"] = parse_model_id(name)


class ErrorFormat(Protocol):
    """The way in which a contract says errors, and what its answers say besides their bodies."""

    def begin(self, request: web.BaseRequest) -> None: ...
    def refusal(self, request: web.BaseRequest, error: AdapterError | None) -> Refusal:
        """Return the answer for an error; None stands for a bug."""

    def headers(self, request: web.BaseRequest) -> Mapping[str, str]: ...


class OwnErrorFormat:
    """Of SageMaker's container contract and of V2."""

    def begin(self, request: web.BaseRequest) -> None: ...

    def refusal(self, request: web.BaseRequest, error: AdapterError | None) -> Refusal:
        return own_refusal(error, request.get("model_id"))

    def headers(self, request: web.BaseRequest) -> Mapping[str, str]:
        return echoed_headers(request.headers)


def error_format_of(request: web.BaseRequest) -> ErrorFormat:
    error_format: ErrorFormat = request["dialect"]
    return error_format


class HttpMiddleware:
    """Wraps one handler for everything: errors, counts, headers that go back.

    `dialects`: of the frontends that have one of their own.
    """

    def __init__(
        self,
        handle: Serve,
        instrumentation: Instrumentation,
        sites: SitePolicy,
        error_formats: Mapping[str, ErrorFormat] | None = None,
    ) -> None:
        self._handle = handle
        self._sites = sites
        self._instrumentation = instrumentation
        self._error_formats = error_formats or {}
        self._own = OwnErrorFormat()

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        begun, waited = clock.monotonic(), Waited()
        WAITED.set(waited)
        contract = request["contract"] = contract_of(request.raw_path, request.headers)
        error_format = self._error_formats.get(contract, self._own)
        request["dialect"] = error_format
        error_format.begin(request)
        in_flight = self._instrumentation.in_flight(contract)
        in_flight.count += 1
        try:
            response = await self._answered(request)
        finally:
            in_flight.count -= 1
        frontend = request.get("frontend", "sagemaker")
        operation, seconds = request.get("operation", "other"), clock.monotonic() - begun
        served = self._instrumentation.served(frontend, operation)
        model_id = request.get("model_id")
        served.count(
            *(response.status, seconds, waited.seconds, waited.callers_seconds), model_id=model_id
        )
        return response

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        error_format = error_format_of(request)
        try:
            self._sites.check(request.headers)
            response = await self._handle(request)
        except AdapterError as error:
            refusal = error_format.refusal(request, error)
            operation, model_id = request.get("operation", "other"), request.get("model_id")
            self._instrumentation.refused(
                *(error, asked_by(request), operation, model_id), more=refusal.logged
            )
            response = _answered(refusal)
        except (ConnectionResetError, asyncio.CancelledError):
            raise  # the caller has gone
        except Exception as error:  # noqa: BLE001 - it is logged, and the caller answered
            target, model_id = (request.method, request.raw_path), request.get("model_id")
            self._instrumentation.bug(error, target, model_id)
            response = _answered(error_format.refusal(request, None))
        if not response.prepared:
            response.headers.update(error_format.headers(request))
        return response


def chunks_of(request: web.BaseRequest, limit: int) -> AsyncIterator[bytes]:
    """Yield the pieces as they arrive. Raises PayloadTooLarge before the first byte too many."""
    known = request.content_length
    if known is not None and known > limit:
        raise PayloadTooLarge(f"the body has {known} bytes; at most {limit} are accepted")
    return _counted(request, limit)


async def whole_body(request: web.BaseRequest, limit: int, held: HeldBody | None = None) -> bytes:
    chunks = []
    async for chunk in chunks_of(request, limit):
        if held is not None:
            await held.take(len(chunk))
        chunks.append(chunk)
    if held is not None:
        held.arrived()
    return b"".join(chunks)


def held_body(
    request: web.BaseRequest, budget: ByteBudget, senders: Iterable[str] = ()
) -> HeldBody:
    """Begin to count the request's body, which is cut by an error for who reads it."""
    application = application_of(request)
    held = HeldBody(
        *(budget, request.content_length, senders),
        fail=application.failed,
        is_reading=application.client.transport.is_reading,
    )
    application.turn = held.turn
    return held


async def _counted(request: web.BaseRequest, limit: int) -> AsyncIterator[bytes]:
    seen = 0
    application_of(request).say_continue(request)
    try:
        async for chunk in request.content.iter_any():
            seen += len(chunk)
            if seen > limit:
                raise PayloadTooLarge(f"the body has more than {limit} bytes")
            yield chunk
            await asyncio.sleep(0)  # there may be more at once
    except (ConnectionError, ClientError, web.RequestPayloadError) as error:
        raise BrokenBody(f"the body broke off after {seen} bytes") from error


# -- spans, if there is a trace collector --------------------------------------------------


def traced(serve: Serve, tracing: Tracing) -> Serve:
    async def with_span(request: web.BaseRequest) -> web.StreamResponse:
        method = request.method
        with tracing.server(method, request.headers) as span:
            response = await serve(request)
            span.set_attribute("http.request.method", method)
            span.set_attribute("url.scheme", "http")
            span.set_attribute("url.path", request.raw_path.partition("?")[0])
            span.set_attribute("http.response.status_code", response.status)
            if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                tracing.failed(span, str(response.status))
            if (route := request.get("route")) is not None:
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)
            if "model_id" in request:
                span.set_attribute(MODEL, request["model_id"])
            return response

    return with_span
