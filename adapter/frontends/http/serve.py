"""Serves the requests of a connection, one after the other.

A planned inference is answered by hand (inference.py); any other call by the handler of its route,
in a task beside the coroutine of the connection. Errors, counts, log lines and spans of both are
here, and nowhere else.
"""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from adapter.errors import AdapterError
from adapter.frontends.endpoint.errors import CallInfo, new_request_id, refusal_of
from adapter.frontends.http.answers import (
    Answer,
    end_of_head,
    word_refusal,
    write_answer,
)
from adapter.frontends.http.connection import Connection
from adapter.frontends.http.inference import Inference, NeedsHandler
from adapter.frontends.http.instrumentation import (
    Refusal,
    echoed_headers,
    own_refusal,
    write_fields,
)
from adapter.frontends.http.parts import Parts
from adapter.frontends.http.plans import Plan
from adapter.frontends.http.request import Request
from adapter.runtime import clock
from adapter.telemetry.tracing import MODEL, Tracing
from adapter.telemetry.traffic import WAITED, Waited

# Answers a request; None once it has written the answer itself.
Handle = Callable[[Request], Awaitable[Answer | None]]


class Service:
    """Serves the connections of one listener."""

    def __init__(
        self,
        parts: Parts,
        handle: Handle,  # answers what is not a planned inference
    ) -> None:
        self._parts = parts
        self._handle = handle
        self._instrumentation = parts.instrumentation

    async def serve(self, connection: Connection) -> None:
        """Serve the requests of a connection until it ends."""
        while (request := await connection.next_request()) is not None:
            plan = request.head.plan
            if plan is not None:
                await self._serve_planned(connection, request, plan)
            else:
                await connection.delegate(self._serve_call(request))
            request.is_answered = True
            if not connection.is_whole and not request.is_last:
                await connection.skip_body()
            connection.end_request(is_last=request.is_last)

    # -- a planned inference ----------------------------------------------------------------

    async def _serve_planned(self, connection: Connection, request: Request, plan: Plan) -> None:
        """Serve an inference with a plan: answer it in the connection's coroutine, or in a task if
        it needs one; then count it.
        """
        request.model_id = plan.model_id
        served = plan.operation.served
        begun_at = clock.monotonic()
        served.in_flight.count += 1
        try:
            await Inference(request, plan, self._parts, begun_at).serve()
        except NeedsHandler:
            await connection.delegate(self._handle_planned(request))
        except AdapterError as error:
            self._refuse(request, error)
        except Exception as error:  # noqa: BLE001 - it is logged, and the client answered
            self._report_bug(request, error)
        finally:
            served.in_flight.count -= 1
        status = request.status
        if status:
            served.count(
                status,
                clock.monotonic() - begun_at,
                request.upstream_seconds,
                request.callers_seconds,
                plan.model_id,
            )

    async def _handle_planned(self, request: Request) -> None:
        """Answer by its handler a planned inference whose model converts bodies."""
        WAITED.set(Waited())
        _start_call_info(request)
        await self._answer(request)
        request.note_waited()

    # -- any other call ---------------------------------------------------------------------

    async def _serve_call(self, request: Request) -> None:
        """Answer a request without a plan by the handler of its route, within a span if traces are
        exported. Runs as a task.
        """
        if self._parts.tracing is None:
            await self._answer_and_count(request)
        else:
            await self._answer_in_span(request, self._parts.tracing)

    async def _answer_and_count(self, request: Request) -> None:
        """Answer a request by the handler of its route, and count it with its times."""
        WAITED.set(Waited())
        _start_call_info(request)
        begun_at = clock.monotonic()
        in_flight = self._instrumentation.in_flight(request.head.contract_name)
        in_flight.count += 1
        try:
            await self._answer(request)
        finally:
            in_flight.count -= 1
        request.note_waited()
        served = self._instrumentation.served(request.frontend, request.operation)
        if request.status:
            served.count(
                request.status,
                clock.monotonic() - begun_at,
                request.upstream_seconds,
                request.callers_seconds,
                request.model_id,
            )

    async def _answer_in_span(self, request: Request, tracing: Tracing) -> None:
        """Answer a request within a server span, which gets its route, status and model."""
        with tracing.server(request.method, request.headers) as span:
            await self._answer_and_count(request)
            span.set_attribute("http.request.method", request.method)
            span.set_attribute("url.scheme", "http")
            span.set_attribute("url.path", request.raw_path.partition("?")[0])
            span.set_attribute("http.response.status_code", request.status)
            if request.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                tracing.failed(span, str(request.status))
            if request.path_template:
                span.update_name(f"{request.method} {request.path_template}")
                span.set_attribute("http.route", request.path_template)
            if request.model_id is not None:
                span.set_attribute(MODEL, request.model_id)

    async def _answer(self, request: Request) -> None:
        """Answer a request by its handler; write the refusal for an error."""
        try:
            self._parts.sites.check(request.headers)
            answer = await self._handle(request)
            if answer is not None:
                request.is_last = not request.connection.can_be_kept()
                write_answer(request, answer, self._own_lines(request))
        except AdapterError as error:
            self._refuse(request, error)
        except ConnectionResetError:
            request.connection.abort()  # Triton's answer broke off, or the client has gone
            request.is_last = True
        except Exception as error:  # noqa: BLE001 - it is logged, and the client answered
            self._report_bug(request, error)
        request.is_answered = True  # the next request may come before this task is seen to end

    # -- errors -----------------------------------------------------------------------------

    def _refuse(self, request: Request, error: AdapterError) -> None:
        """Log an error, and answer with it; where an answer has begun, abort the connection."""
        if request.status:
            request.connection.abort()
            request.is_last = True
            return
        refusal = self._word(request, error)
        self._instrumentation.refused(
            error,
            request.describe_for_log,
            _find_operation(request),
            request.model_id,
            more=refusal.logged,
        )
        self._write_refusal(request, refusal)

    def _report_bug(self, request: Request, error: Exception) -> None:
        """Log an error that nobody expected; answer 500, or abort the connection."""
        target = (request.method, request.raw_path)
        self._instrumentation.bug(error, target, request.model_id)
        connection = request.connection
        if request.status:
            connection.abort()
            request.is_last = True
            return
        try:
            self._write_refusal(request, self._word(request, None))
        except Exception as another:  # noqa: BLE001 - it is logged, and the client cut off
            self._instrumentation.bug(another, target, request.model_id)
            connection.abort()
            request.is_last = True

    def _word(self, request: Request, error: AdapterError | None) -> Refusal:
        """Word an error as the contract of the request does; None stands for a bug."""
        plan = request.head.plan
        if plan is not None:
            return plan.contract.refuse(error, request)
        if request.call_info is not None:
            return refusal_of(error, request.call_info)
        return own_refusal(error, request.model_id)

    def _write_refusal(self, request: Request, refusal: Refusal) -> None:
        """Write a refusal as the answer, and end the connection behind it if the rest of the body
        is not to be read.
        """
        connection = request.connection
        request.is_last = not connection.can_be_kept()
        request.status = refusal.status
        end = end_of_head(request, self._parts.clock)
        head, body = word_refusal(refusal, self._own_lines(request), end)
        connection.transport.write(head if request.method == "HEAD" else head + body)

    def _own_lines(self, request: Request) -> bytes:
        """Return the header lines that any answer of the request's contract has."""
        plan = request.head.plan
        if plan is not None:
            return plan.echoed + plan.contract.answer_lines(request)
        return write_fields(list_own_headers(request))


def _start_call_info(request: Request) -> None:
    """Mark a request to an endpoint as such, and give it a CallInfo with a new request id, for the
    headers of its answer. No-op for other requests.
    """
    name = request.head.contract_name
    if name == "endpoint":
        request.frontend = name
        if request.call_info is None:
            request.call_info = CallInfo(new_request_id(), authorization=request.read_authorization)


def list_own_headers(request: Request) -> Mapping[str, str]:
    """Return the headers that any answer of the request's contract has."""
    if request.call_info is not None:
        return request.call_info.headers()
    return echoed_headers(request.headers)


def _find_operation(request: Request) -> str:
    """Return the name of a request's operation, from its plan or its route."""
    plan = request.head.plan
    return request.operation if plan is None else plan.operation.name
