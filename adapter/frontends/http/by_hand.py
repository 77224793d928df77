"""Sends one small inference of texts to Triton in the coroutine of the connection, without a task.

A task and what it needs take as much CPU as all the rest of a small call. Whatever has to be waited
for but the body and the answer (the model, its config, a new connection to Triton) is left to the
handler, which runs in a task.
"""

from adapter.control.door import Lease
from adapter.core.calls import Upstream
from adapter.errors import BackendError, CapacityError
from adapter.frontends.http.connection import Request
from adapter.frontends.http.stepping import wait_for_news
from adapter.runtime import clock

_HEADER_LENGTH = b"inference-header-content-length"
_HEAD = (
    b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: %b\r\nContent-Type: application/octet-stream\r\n"
    b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n"
)


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
    body: bytes,
    json_bytes: int,
) -> tuple[bytes, int | None]:
    """Send an inference; return its answer, and how much of that is JSON. Raises what failed, once
    all was released.
    """
    connection = request.connection
    exchange = connection.exchange
    started_at = clock.monotonic()
    lease.begin(started_at)
    try:
        exchange.begin(upstream, lease.record)
        host = connection.parts.dataplane.host.encode()
        name = str(lease.record.name).encode()
        upstream.send(_HEAD % (name, host, json_bytes, len(body)), body)
        while exchange.error is None and not exchange.has_ended:
            await wait_for_news()
    finally:
        error: BaseException | None = exchange.error
        answer = exchange.answer or b"".join(exchange.take_pieces())
        exchange.leave(lease)
        if lease.is_held():  # an abandoned lease ends when Triton is done
            error = lease.end(error)
    if isinstance(error, BackendError | CapacityError):
        error = await connection.delegate(lease.judge(error))
    if error is not None:
        raise error
    request.upstream_seconds = clock.monotonic() - started_at
    sizes = [value for name, value in upstream.headers if name.lower() == _HEADER_LENGTH]
    return answer, int(sizes[0]) if sizes else None
