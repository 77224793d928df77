"""What a connection asks of who serves its requests."""

from typing import TYPE_CHECKING, Protocol

from adapter.errors import InvalidRequest
from adapter.frontends.http_lane.head import Heads
from adapter.frontends.http_lane.limits import Limits
from adapter.frontends.http_lane.reply import Reply
from adapter.frontends.http_lane.request import Request

if TYPE_CHECKING:
    from adapter.frontends.http_lane.connection import Connection


class Server(Protocol):
    """`serve` writes the whole answer, or `reply` is not over."""

    limits: Limits
    heads: Heads
    date: str

    @property
    def takes_more(self) -> bool: ...

    async def serve(self, request: Request, reply: Reply, connection: "Connection") -> None: ...
    def malformed(self, error: InvalidRequest) -> bytes: ...
    def opened(self, connection: "Connection") -> None: ...
    def lost(self, connection: "Connection") -> None: ...
