"""What several tests of the gRPC proxy are given."""

import pytest

from adapter.relay import listener, transport


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a test is within one second of the proxy's, which so many frames may come in, and who
    is left with an error has the time to read it: a slow machine takes longer over a flood.
    """
    monkeypatch.setattr(listener, "_TICKS_A_SECOND", 10**9)
    monkeypatch.setattr(transport, "_ERROR_CLOSE_SECONDS", 60.0)
