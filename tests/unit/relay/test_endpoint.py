"""A shutdown of a session at any time."""

from adapter.relay.policy import RelayContext
from adapter.relay.session import RelaySession
from adapter.relay.transport import State
from adapter.runtime.byte_budget import ByteBudget
from tests.unit.relay.test_transport import Wire


async def test_session_closes_when_shut_down_before_connected():
    """Its listener closes between the accept and the first turn of the connection."""
    context = RelayContext(
        None, None, None, timeout_seconds=1, max_message_bytes=1, budget=ByteBudget(1)
    )
    session, wire = RelaySession(context), Wire()
    session.shut_down()
    assert session.state is State.CLOSED
    assert session.ended.is_set()
    session.connection_made(wire)
    assert wire.ends == ["abort"]
    assert wire.written == []
