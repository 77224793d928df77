"""An answer to a caller is over where it is as long as its head says."""

from dataclasses import dataclass, field

import pytest

from adapter.frontends.http_lane.head import Head
from adapter.frontends.http_lane.reply import Reply
from adapter.frontends.http_lane.request import Request
from tests.lanes.http_door import LANE, request
from tests.lanes.http_upstream import pieces_of


@dataclass
class Written:
    """What goes to the caller."""

    date: str = "today"
    pieces: list[bytes] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    async def drained(self) -> None:
        pass

    def is_kept_after(self, request: Request) -> bool:
        return request.is_whole


def reply_to(out: Written) -> Reply:
    head, raw = Head(), request(LANE, b"")
    head.feed(raw)
    return Reply(out, Request(head, None, 0.0))


@pytest.mark.parametrize("pieces", [(), (b"abc", b"d"), (b"abc", b"def"), (b"abcdef",)])
async def test_one_of_another_length_is_never_over(pieces):
    out = Written()
    reply = reply_to(out)
    with pytest.raises(ConnectionResetError):
        await reply.stream(200, (), 5, pieces_of(*pieces))
    assert not reply.is_over
    assert len(b"".join(out.pieces).partition(b"\r\n\r\n")[2]) <= 5


@pytest.mark.parametrize("pieces", [(b"abcde",), (b"abc", b"", b"de")])
async def test_one_of_that_length_is_over(pieces):
    out = Written()
    reply = reply_to(out)
    await reply.stream(200, (), 5, pieces_of(*pieces))
    assert reply.is_over
    assert b"".join(out.pieces).endswith(b"\r\n\r\nabcde")
