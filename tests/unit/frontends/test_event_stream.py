"""Judged by botocore's decoder, which every AWS client in Python reads with."""

from botocore.eventstream import EventStreamBuffer
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.frontends.endpoint.event_stream import event, exception, message

_NAMES = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda n: len(n.encode()) < 256)
_VALUES = st.text(st.characters(codec="utf-8"), max_size=2000)


def _decoded(*messages: bytes, cut: int = 0) -> list[tuple[dict[str, str], bytes]]:
    buffer, data = EventStreamBuffer(), b"".join(messages)
    buffer.add_data(data[:cut])
    found = list(buffer)
    buffer.add_data(data[cut:])
    return [(read.headers, read.payload) for read in (*found, *buffer)]


@settings(deadline=None)
@given(st.dictionaries(_NAMES, _VALUES, max_size=5), st.binary(max_size=5000), st.integers(0, 99))
def test_botocore_reads_messages_cut_anywhere(
    headers: dict[str, str], payload: bytes, cut: int
) -> None:
    found = _decoded(message(headers, payload), message({}, b""), cut=cut)
    assert found == [(headers, payload), ({}, b"")]


def test_events_and_exceptions_differ_by_headers() -> None:
    [(part, payload), (error, reason)] = _decoded(
        event("PayloadPart", b"\x00\xff"), exception("ModelStreamError", b"{}")
    )
    assert (part[":message-type"], part[":event-type"], payload) == (
        *("event", "PayloadPart", b"\x00\xff"),
    )
    assert (error[":message-type"], error[":exception-type"], reason) == (
        *("exception", "ModelStreamError", b"{}"),
    )
