"""Time limits of proxied requests: deadlines, slow senders, clients that do not read."""

import asyncio

from adapter.http2.context import ProxyContext
from adapter.http2.downstream import Downstream
from adapter.http2.frames import Code
from adapter.http2.policy import Reason, RelayError
from adapter.http2.responses import Responses
from adapter.http2.stream import Exchange, Stage

_MAX_TICK_SECONDS = 0.5  # after a longer pause it was the event loop that was slow, not the clients


class TimeLimits:
    """Applies them to the requests of one connection."""

    def __init__(self, context: ProxyContext, downstream: Downstream, responses: Responses) -> None:
        self._context = context
        self._downstream = downstream
        self._responses = responses
        self._clock = asyncio.get_running_loop().time
        self._checked = self._clock()

    def check(self) -> None:
        now = self._clock()
        seconds, self._checked = min(now - self._checked, _MAX_TICK_SECONDS), now
        for stream in list(self._downstream.streams.values()):
            exchange = stream.owner
            if now > exchange.deadline:
                self._responses.deadline_exceeded(exchange)
            elif exchange.is_arriving:
                self._check_arriving(exchange, seconds)
            elif stream.queue:
                self._check_unread(exchange, now)

    def model_unloads(self, exchange: Exchange) -> None:
        """Refuse a request that is still arriving; expect the response to be read fast."""
        if exchange.is_arriving:
            self._refuse_arriving(exchange, "the model is being unloaded")
            self._responses.flush()
        elif exchange.hurry_mark is None:
            exchange.hurry_mark = (self._clock(), exchange.taken_bytes)

    def _check_arriving(self, exchange: Exchange, seconds: float) -> None:
        """`seconds` have passed since the last check."""
        if self._context.is_stopping:
            self._refuse_arriving(exchange, "the adapter is stopping")
        elif exchange.stage is Stage.WAITING or exchange.inbound.is_held_back:
            return  # its caller is not the one that is waited for
        elif self._downstream.may_send(exchange.inbound):
            exchange.waited_seconds += seconds
            limits, waited = self._context.caller_limits, exchange.waited_seconds
            if waited > limits.slow and exchange.received_bytes < waited * limits.rate:
                error = RelayError(
                    Reason.SLOW, f"it comes at less than {limits.rate / 2**10:g} KiB/s"
                )
                self._responses.refuse(exchange, error)

    def _refuse_arriving(self, exchange: Exchange, why: str) -> None:
        error = RelayError(Reason.NOT_STARTED, f"{why}; this request had not wholly come yet")
        self._responses.refuse(exchange, error)

    def _check_unread(self, exchange: Exchange, now: float) -> None:
        """Part of the response is queued because the client does not read."""
        limits, taken = self._context.caller_limits, exchange.taken_bytes
        if self._context.is_stopping and exchange.hurry_mark is None:
            exchange.hurry_mark = (now, taken)
        if exchange.unread_mark is None and exchange.direct_call is not None:
            exchange.direct_call.on_unload(lambda: self.model_unloads(exchange))
        if exchange.unread_mark is None or exchange.unread_mark[1] != taken:
            exchange.unread_mark = (now, taken)
        is_stuck = (
            exchange.direct_call is not None and now - exchange.unread_mark[0] > limits.answer
        )
        if exchange.hurry_mark is not None:
            seconds = now - exchange.hurry_mark[0]
            so_far = taken - exchange.hurry_mark[1]
            is_stuck |= seconds > limits.hurry and so_far < seconds * limits.rate
        if is_stuck:
            self._downstream.reset(exchange.inbound, Code.CANCEL)
            self._responses.client_cancelled(exchange)
