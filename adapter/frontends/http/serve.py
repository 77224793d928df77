"""Serves the requests of a connection, one after the other.

A planned inference is answered by hand (inference.py); any other call by the handler of its route,
in a task beside the coroutine of the connection, unless the handler can do without (by_hand.py).
Errors, counts, log lines and spans of all are here, and nowhere else.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from adapter.errors import AdapterError, drop_tracebacks
from adapter.frontends.endpoint.errors import CallInfo, new_request_id, refusal_of
from adapter.frontends.http.answers import JSON_LINE, Answer, begin_answer, write_answer
from adapter.frontends.http.connection import Connection, Parts, Request
from adapter.frontends.http.inference import Inference, NeedsHandler
from adapter.frontends.http.instrumentation import (
    Refusal,
    encoded,
    own_refusal,
    write_fields,
)
from adapter.frontends.http.plans import Plan
from adapter.frontends.openai import errors as openai
from adapter.runtime import clock
from adapter.telemetry.tracing import MODEL, Tracing
from adapter.telemetry.traffic import WAITED, Served, Waited

# Answers a request in a task; returns None once it has written the answer itself.
Handle = Callable[[Request], Awaitable[Answer | None]]


@dataclass(frozen=True, slots=True)
class ByHand:
    """Handles calls in the coroutine of their connection where it can, which saves the CPU of a
    task.
    """

    # answers in the coroutine of the connection; None once it has written the answer itself, or
    # with nothing written if the call needs a task
    try_by_hand: Handle
    in_task: Handle

    def __call__(self, request: Request) -> Awaitable[Answer | None]:
        """Answer a call in a task."""
        return self.in_task(request)


# Returns the answer of a handler: in this task, or in a task of its own.
Call = Callable[[Handle, Request], Awaitable[Answer | None]]
# Returns what answers a request. Raises the error of one that is refused at once.
Find = Callable[[Request], Handle]


class Service:
    """Serves the connections of one listener."""

    def __init__(
        self,
        parts: Parts,
        find: Find,  # the handler of what is not a planned inference
    ) -> None:
        self._parts = parts
        self._find = find
        self._instrumentation = parts.instrumentation

    async def serve(self, connection: Connection) -> None:
        """Serve the requests of a connection until it ends."""
        while (request := await connection.next_request()) is not None:
            plan = request.head.plan
            if plan is not None:
                await self._serve_planned(request, plan)
            elif self._parts.tracing is None:
                await self._serve_call(request, _answer_beside)
            else:
                await connection.delegate(self._serve_in_span(request, self._parts.tracing))
            request.is_answered = True
            if not connection.is_whole and not request.is_last:
                await connection.skip_body()
            connection.end_request(is_last=request.is_last)

    async def _serve_planned(self, request: Request, plan: Plan) -> None:
        """Serve an inference with a plan, and count it."""
        request.model_id = plan.model_id
        served = plan.operation.served
        begun_at = clock.monotonic()
        served.in_flight.count += 1
        try:
            await Inference(request, plan, self._parts, begun_at).serve()
        except NeedsHandler:  # its model converts bodies
            _start_call_info(request)
            await self._answer(request, _answer_beside)
        except Exception as error:  # noqa: BLE001 - the client is answered
            self._refuse(request, error)
        finally:
            served.in_flight.count -= 1
        _count_answer(served, request, begun_at)

    # -- any other call ---------------------------------------------------------------------

    async def _serve_call(self, request: Request, call: Call) -> None:
        """Answer a request by the handler of its route, and count it with its times."""
        _start_call_info(request)
        begun_at = clock.monotonic()
        in_flight = self._instrumentation.in_flight(request.head.contract_name)
        in_flight.count += 1
        try:
            await self._answer(request, call)
        finally:
            in_flight.count -= 1
        _count_answer(
            self._instrumentation.served(request.frontend, request.operation), request, begun_at
        )

    async def _serve_in_span(self, request: Request, tracing: Tracing) -> None:
        """Serve a request within a server span, which gets its route, status and model. Runs as a
        task.
        """
        with tracing.server(request.method, request.headers) as span:
            await self._serve_call(request, _answer_here)
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

    async def _answer(self, request: Request, call: Call) -> None:
        """Answer a request by its handler; write the refusal for an error."""
        try:
            if request.head.needs_site_check:
                self._parts.sites.check(request.headers)
            answer = await call(self._find(request), request)
            if answer is not None:
                write_answer(request, answer)
        except Exception as error:  # noqa: BLE001 - the client is answered
            self._refuse(request, error)

    # -- errors -----------------------------------------------------------------------------

    def _refuse(self, request: Request, error: Exception) -> None:
        """Log an error, and answer with it; where an answer has begun, abort the connection. An
        error that nobody expected is answered with 500.
        """
        try:
            expected = error if isinstance(error, AdapterError) else None
            if expected is None:
                self._report_bug(request, error)
            if request.status:
                drop_tracebacks(error)
                _abort(request)
                return
            refusal = _word_refusal(request, expected)
            if expected is not None:
                self._instrumentation.record_refusal(
                    expected,
                    request.describe_for_log,
                    _find_operation(request),
                    request.model_id,
                    more=refusal.logged,
                )
            _write_refusal(request, refusal)
        except Exception as another:  # noqa: BLE001 - a bug is logged, and its client cut off
            self._report_bug(request, another)
            _abort(request)

    def _report_bug(self, request: Request, error: Exception) -> None:
        """Log an error that nobody expected."""
        self._instrumentation.record_bug(
            error, (request.method, request.raw_path), request.model_id
        )


def _word_refusal(request: Request, error: AdapterError | None) -> Refusal:
    """Word an error as the contract of the request does; None stands for a bug."""
    plan = request.head.plan
    if plan is not None:
        return plan.contract.refuse(error, request)
    if request.call_info is not None:
        return refusal_of(error, request.call_info)
    if request.head.contract_name == "openai":
        return openai.refusal_of(error, request.model_id)
    return own_refusal(error, request.model_id)


def _write_refusal(request: Request, refusal: Refusal) -> None:
    """Write a refusal as the answer."""
    body = encoded(refusal.body)
    head = begin_answer(
        request, refusal.status, write_fields(refusal.headers) + JSON_LINE, len(body)
    )
    request.connection.transport.write(head if request.method == "HEAD" else head + body)


async def _answer_here(handle: Handle, request: Request) -> Answer | None:
    """Return the answer of a handler that runs in this task, and note how long that has waited."""
    WAITED.set(Waited())
    try:
        answer = await handle(request)
    finally:
        request.note_waited()
    # bytes that arrive before the task is seen to end belong to the next request
    request.is_answered = answer is None
    return answer


async def _answer_beside(handle: Handle, request: Request) -> Answer | None:
    """Return the answer of a handler: by hand if it can, else by a task beside this coroutine."""
    if isinstance(handle, ByHand):
        answer = await handle.try_by_hand(request)
        if answer is not None or request.status:
            return answer
    return await request.connection.delegate(_answer_here(handle, request))


def _count_answer(served: Served, request: Request, begun_at: float) -> None:
    """Count a request that was answered."""
    if request.status:
        served.count(
            request.status,
            clock.monotonic() - begun_at,
            request.upstream_seconds,
            request.callers_seconds,
            request.model_id,
        )


def _abort(request: Request) -> None:
    """Cut off a client whose answer cannot be completed."""
    request.connection.abort()
    request.is_last = True


def _start_call_info(request: Request) -> None:
    """Mark a request to an endpoint as such, and give it a CallInfo with a new request id, for the
    headers of its answer. No-op for other requests.
    """
    name = request.head.contract_name
    if name == "endpoint":
        request.frontend = name
        if request.call_info is None:
            request.call_info = CallInfo(new_request_id(), authorization=request.read_authorization)


def _find_operation(request: Request) -> str:
    """Return the name of a request's operation, from its plan or its route."""
    plan = request.head.plan
    return request.operation if plan is None else plan.operation.name
