"""Which members of an endpoint call are accepted, and the errors for the others."""

import pytest
from multidict import CIMultiDict

from adapter.errors import InvalidCall
from adapter.frontends.endpoint.members import TARGET_MODEL, read_members


def test_value_not_utf8_is_shown_as_utf8() -> None:
    """AWS's client for JavaScript sends Latin-1; strict readers of JSON refuse half a pair."""
    sent = b"d\xefgits".decode("utf-8", "surrogateescape")
    with pytest.raises(InvalidCall, match=r"Value 'd\\xefgits' at 'targetModel'"):
        read_members("any", CIMultiDict({TARGET_MODEL: sent}), is_stream=False)
