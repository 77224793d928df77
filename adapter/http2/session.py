"""One client's HTTP/2 connection, and the upstream connections of its requests.

A request goes to Triton directly when the routing policy admits it, and else to the fallback server
of this process. Each connection is an HTTP/2 connection in its own right: an upstream that is lost
fails its requests, and the next request gets a new one. An upstream outlives its client while
Triton works on abandoned requests.
"""

import asyncio
from contextlib import suppress

from adapter.http2.context import ProxyContext
from adapter.http2.downstream import Downstream
from adapter.http2.frames import Code
from adapter.http2.requests import Requests
from adapter.http2.responses import Responses
from adapter.http2.time_limits import TimeLimits
from adapter.http2.transport import Heard, State
from adapter.http2.upstream import Upstream

_SETTINGS_SECONDS, _SILENT_SECONDS, _PING_SECONDS, _IDLE_SECONDS = 15.0, 60.0, 20.0, 3600.0
_POLL_SECONDS = 0.1


class ProxySession:
    def __init__(self, context: ProxyContext) -> None:
        self.context = context
        self.upstreams: list[Upstream] = []
        self.downstream = Downstream(self, context)
        self.responses = Responses(context, self.downstream, self.flush)
        self.time_limits = TimeLimits(context, self.downstream, self.responses)
        self.requests = Requests(
            context, self.downstream, self.upstream, self.responses, self.time_limits
        )
        self.ended = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._begun = self._received_at = self._busy_at = self._clock()

    def flush(self) -> None:
        self.downstream.flush()
        for upstream in self.upstreams:
            upstream.flush()

    # -- upstream connections ---------------------------------------------------------------

    def upstream(self, *, is_triton: bool) -> Upstream:
        """Return one that accepts more streams."""
        for upstream in self.upstreams:
            if upstream.is_triton is is_triton and upstream.accepts_streams:
                return upstream
        upstream = Upstream(self, self.context, is_triton=is_triton)
        self.upstreams.append(upstream)
        self.context.begin(self._connect(upstream))
        return upstream

    async def _connect(self, upstream: Upstream) -> None:
        connect = (
            self.context.connect_triton if upstream.is_triton else self.context.connect_fallback
        )
        try:
            await connect(upstream.transport)
        except OSError:
            upstream.close()
            self.flush()

    def upstream_lost(self, upstream: Upstream) -> None:
        self.upstreams.remove(upstream)
        delivered = upstream.transport.was_open
        why = "the connection to Triton broke" if delivered else "Triton cannot be reached"
        for stream in list(upstream.streams.values()):
            upstream.forget(stream)
            self.responses.upstream_failed(stream.owner, why, delivered=delivered)

    # -- the session ------------------------------------------------------------------------

    def downstream_lost(self) -> None:
        for stream in list(self.downstream.streams.values()):
            self.downstream.forget(stream)
            self.responses.client_cancelled(stream.owner)
        for upstream in list(self.upstreams):
            upstream.close_if_done()

    def end_if_done(self) -> None:
        if self.downstream.transport.state is State.CLOSED and not self.upstreams:
            self.ended.set()

    @property
    def is_done(self) -> bool:
        """Whether the client has left and no model works on a request of it."""
        return self.downstream.transport.state is State.CLOSED and all(
            stream.owner.direct_call is not None and stream.owner.direct_call.is_lost
            for upstream in self.upstreams
            for stream in upstream.streams.values()
        )

    async def until_done(self) -> None:
        while not (self.ended.is_set() or self.is_done):
            with suppress(TimeoutError):  # that a model is gone is told to nobody
                async with asyncio.timeout(_POLL_SECONDS):
                    await self.ended.wait()

    def close(self) -> None:
        """Close every connection at once, whatever is in flight."""
        self.downstream.close(Code.CANCEL)
        for upstream in list(self.upstreams):
            upstream.close()

    def check_requests(self) -> None:
        """Called ten times a second: apply time limits and the limit of buffered bytes."""
        self.time_limits.check()
        if self.downstream.is_over_budget:
            self.requests.drain_buffers()
        elif self.downstream.is_stalled:
            self.requests.refuse_held_back()
        self.flush()

    def check_connection(self) -> None:
        """Called once a second: detect dead and idle peers, and refill the budget of glitches."""
        now, downstream, transport = self._clock(), self.downstream, self.downstream.transport
        for endpoint in (downstream, *self.upstreams):
            endpoint.a_second_passed()
        if downstream.streams:
            self._busy_at = now
        if transport.heard is Heard.SOMETHING:
            self._received_at, transport.heard = now, Heard.NOTHING
        if not downstream.is_acknowledged and now - self._begun > _SETTINGS_SECONDS:
            downstream.close(Code.SETTINGS_TIMEOUT)
        elif now - self._received_at > _SILENT_SECONDS + _PING_SECONDS:
            downstream.close()
        elif now - self._received_at > _SILENT_SECONDS and transport.heard is Heard.NOTHING:
            downstream.ping()
        elif now - self._busy_at > _IDLE_SECONDS:
            downstream.shut_down()
        self.flush()
