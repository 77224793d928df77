"""Sends one small inference to Triton in the coroutine of the connection, without a task.

A task and what it needs take a quarter of the CPU of a small call. Whatever has to be waited
for but the body and the answer (the model, its config, a new connection to Triton) is left to the
handler, which runs in a task. A failure is judged, and a large answer is read, by a task of its
own. A call ends alike on both ways (tests/frontends/http/test_openai_ways.py).
"""

from collections.abc import Callable
from typing import TypeVar

from adapter.codecs.base import SLOW_BYTES, converted
from adapter.control.door import Lease
from adapter.core.calls import Upstream
from adapter.errors import BackendError, CapacityError
from adapter.frontends.http.connection import Request
from adapter.frontends.http.stepping import wait_for_news
from adapter.runtime import clock

T = TypeVar("T")

_HEADER_LENGTH = b"inference-header-content-length"


async def gather_body(request: Request) -> bytes:
    """Return the whole body. It counts in the budget until the request is answered."""
    connection = request.connection
    started_at = clock.monotonic()
    if not connection.is_whole:
        connection.send_continue()
        connection.hold_body()
    body = await connection.gather_body()
    request.callers_seconds = clock.monotonic() - started_at
    return body


async def infer_by_hand(
    request: Request,
    lease: Lease,  # not begun yet
    upstream: Upstream,  # an idle connection to Triton
    head: bytes,
    body: bytes,
    *,
    read: Callable[[bytes, int | None], T],  # reads an answer, of which so many bytes are JSON
) -> T:
    """Send an inference, and return what `read` makes of its answer, in a thread if that takes
    long. Raises the error to refuse the request with, once all was released.
    """
    connection = request.connection
    try:
        with lease:
            answer, json_bytes = await _exchange(request, lease, upstream, head, body)
            if len(answer) <= SLOW_BYTES:
                return read(answer, json_bytes)
            return await connection.delegate(converted(len(answer), read, answer, json_bytes))
    except (BackendError, CapacityError) as error:
        raise await connection.delegate(lease.judge(error)) from error


async def _exchange(
    request: Request, lease: Lease, upstream: Upstream, head: bytes, body: bytes
) -> tuple[bytes, int | None]:
    """Send an inference; return its answer, and how much of that is JSON. Triton goes on with an
    inference that is given up, for which the lease is abandoned.
    """
    exchange = request.connection.exchange
    started_at = clock.monotonic()
    exchange.begin(upstream, lease.record)
    try:
        upstream.send(head, body)
        while not exchange.has_ended:
            if exchange.error is not None:
                raise exchange.error
            await wait_for_news()
        answer = exchange.answer or b"".join(exchange.take_pieces())
    finally:
        exchange.leave(lease)
        request.upstream_seconds = clock.monotonic() - started_at
    sizes = [value for name, value in upstream.headers if name.lower() == _HEADER_LENGTH]
    return answer, int(sizes[0]) if sizes else None
