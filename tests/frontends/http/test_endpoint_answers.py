"""What no real part can be made to fail at is told to callers of an endpoint as AWS tells it."""

import pytest

from adapter.core.calls import NOT_STARTED
from adapter.errors import BackendUnavailable, NoRoom, Overloaded
from adapter.frontends.http.server import Connections
from tests.frontends.http.listener import HANDLED, Listener, head, opened, request

PATH = "/endpoints/any/invocations"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("a bug"), (500, "InternalFailure", None, None)),
        (
            BackendUnavailable("Triton cannot be reached", delivered=False),
            (503, "ServiceUnavailable", "1000", "1"),
        ),
        (BackendUnavailable("Triton ended", delivered=True), (424, "ModelError", None, None)),
        (Overloaded("a queue is full", delivered=True), (503, "ServiceUnavailable", "1000", None)),
        (
            NoRoom("all others are pinned", retry_after_ms=60_000),
            (503, "ServiceUnavailable", "60000", "1"),
        ),
    ],
    ids=["a bug", "no Triton", "Triton had it", "Triton is busy", "no room for long"],
)
async def test_endpoint_error_has_code_and_retry_hint(
    listener: Listener, error: Exception, expected: tuple[int, str, str | None, str | None]
) -> None:
    """The code is that of AWS; the hint is for other machines."""
    listener.raised = error
    found = await (await listener.connect()).ask(request(PATH))
    headers = found.headers
    code, wait = headers["x-amzn-errortype"], headers.get("x-amz-retry-after")
    assert (found.status, code, wait, headers.get(NOT_STARTED.lower())) == expected
    assert found.json()["Message"]
    assert (headers["x-triton-adapter-cache"], len(headers["x-amzn-requestid"])) == ("miss", 36)


async def test_connection_over_the_limit_is_told_to_retry() -> None:
    async with opened(connections=Connections(1)) as listener:
        await (await listener.connect()).send(head(HANDLED, "Content-Length: 9"))
        found = await (await listener.connect()).answer()
        assert (found.status, found.json()["code"]) == (503, "TooManyConnections")
        assert found.json()["Message"] == "too many connections"
        headers = found.headers
        assert headers["x-amzn-errortype"] == "ServiceUnavailable"
        assert (headers["retry-after"], headers["x-amz-retry-after"]) == ("1", "1000")
        assert headers[NOT_STARTED.lower()] == "1"
        assert (headers["x-triton-adapter-cache"], len(headers["x-amzn-requestid"])) == ("miss", 36)
