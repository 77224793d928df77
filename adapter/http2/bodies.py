"""Large messages, as the budget of callers' bytes knows them."""

from typing import Protocol

from adapter.http2.downstream import Downstream
from adapter.http2.stream import Exchange
from adapter.runtime.byte_budget import ByteBudget


class Responses(Protocol):
    def refuse(self, exchange: Exchange, error: Exception) -> None: ...
    def flush(self) -> None: ...


class LargeBody:
    """The message of one request, which counts until all of it has been forwarded. While it waits
    for room, its caller gets no credit to send more.
    """

    def __init__(
        self,
        exchange: Exchange,
        downstream: Downstream,
        responses: Responses,
        budget: ByteBudget,
        size: int,
    ) -> None:
        self._exchange = exchange
        self._downstream = downstream
        self._responses = responses
        self._holding = budget.hold(self, size)

    def take(self, size: int) -> None:
        if not self._holding.take(size):
            self._downstream.hold_back(self._exchange.inbound, size)

    def end(self) -> None:
        self._downstream.let_on(self._exchange.inbound)
        self._holding.end()

    # -- for the budget ---------------------------------------------------------------------

    def is_reading(self) -> bool:
        outbound = self._exchange.outbound
        is_taken = outbound is None or not outbound.queue
        return is_taken and self._downstream.may_send(self._exchange.inbound)

    def resume(self) -> None:
        self._downstream.let_on(self._exchange.inbound)
        self._responses.flush()

    def cut(self, error: Exception) -> None:
        self._responses.refuse(self._exchange, error)
        self._responses.flush()
