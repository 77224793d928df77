"""A session waits for the model of a message that is too large for the fallback server."""

import asyncio

import pytest

from adapter.relay import frames
from adapter.relay.headers import encoded
from adapter.relay.policy import RelayContext
from adapter.relay.session import RelaySession
from adapter.runtime.byte_budget import ByteBudget
from tests.unit.relay.test_transport import Wire


class NotLoaded:
    """A policy whose model `m` is being loaded."""

    def __init__(self, metadata_name: str | None) -> None:
        self.metadata_name = metadata_name
        self.waits: list[bytes] = []
        self.refusals: list[str] = []

    def is_forwarded(self, _):
        return True

    def route(self, _):
        return True, self.metadata_name

    def max_bytes(self, _):
        return 100

    def admit(self, _name, _metadata_name, _message):
        return None

    async def wait_until_ready(self, name, _metadata_name):
        self.waits.append(name)
        await asyncio.Event().wait()

    def report_refusal(self, _path, error, _metadata_name, _headers):
        self.refusals.append(str(error))
        return 14, str(error), ()


def request_of(size: int) -> bytes:
    head = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/s/m"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ]
    content = b"\x0a\x01m\x12\x7f" + bytes(127)
    content += (b"\x12\x7f" + bytes(127)) * (size // 129)
    message = b"\0" + len(content).to_bytes(4) + content
    return b"".join(
        [
            frames.PREFACE,
            frames.settings({}),
            frames.header_block(1, encoded(head), end=False),
            frames.head(len(message), frames.DATA, frames.END_STREAM, 1),
            message,
        ]
    )


@pytest.mark.parametrize(
    ("metadata_name", "waits"), [(None, True), ("m", True), ("another", False)]
)
async def test_large_message_waits_for_its_own_model(metadata_name, waits):
    policy = NotLoaded(metadata_name)
    context = RelayContext(
        policy, None, None, timeout_seconds=1, max_message_bytes=4000, budget=ByteBudget(2**20)
    )
    session = RelaySession(context)
    session.connection_made(Wire())
    session.data_received(request_of(500))
    await asyncio.sleep(0)
    assert policy.waits == ([b"m"] if waits else [])
    assert policy.refusals == ([] if waits else ["message larger than max (519 vs. 100)"])
    session.close_all()
    for task in context.tasks:
        task.cancel()


class Ready(NotLoaded):
    """A policy whose model `m` takes inferences, but not directly."""

    async def wait_until_ready(self, name, _metadata_name):
        self.waits.append(name)


async def test_large_message_waits_once_for_a_ready_model():
    policy = Ready(None)
    context = RelayContext(
        policy, None, None, timeout_seconds=1, max_message_bytes=4000, budget=ByteBudget(2**20)
    )
    session = RelaySession(context)
    session.connection_made(Wire())
    session.data_received(request_of(500))
    while context.tasks:
        await asyncio.wait(context.tasks)
    assert policy.waits == [b"m"]
    assert policy.refusals == ["message larger than max (519 vs. 100)"]
    assert context.budget.held == 0
    session.close_all()
