"""One caller's connection, the links that its requests go on to, and what becomes of each request.

A request goes to Triton as it is when the gate lets it through, and else to the server beside us.
The caller's connection and each link are HTTP/2 connections in their own right: a link that goes
fails what it had, and the next request gets another one. Links live on while Triton works on
what a caller has left.
"""

import asyncio

from adapter.dataplane.proxy.arriving import Arriving
from adapter.dataplane.proxy.context import ProxyContext
from adapter.dataplane.proxy.downstream import Downstream
from adapter.dataplane.proxy.upstream import Upstream
from adapter.protocols.http2.frames import Code

_GREETING_SECONDS, _SILENT_SECONDS, _PONG_SECONDS, _IDLE_SECONDS = 15.0, 60.0, 20.0, 3600.0
_LOOKED_AWAY_SECONDS = 0.5  # longer, and it is not the callers who were slow


class ProxySession(Arriving):
    def __init__(self, context: ProxyContext) -> None:
        super().__init__(context)
        self.downstream = Downstream(self, context)
        self.ended = asyncio.Event()
        self._begun = self._heard = self._busy = self._looked = self.clock()

    def flush(self) -> None:
        self.downstream.give()
        if self.downstream.out:
            self.downstream.flush()
        for upstream in self.upstreams:
            upstream.give()
            if upstream.out:
                upstream.flush()

    # -- links ------------------------------------------------------------------------------

    def upstream(self, *, is_triton: bool) -> Upstream:
        for upstream in self.upstreams:
            if upstream.is_triton is is_triton and upstream.takes_more:
                return upstream
        upstream = Upstream(self, self.context, is_triton=is_triton)
        self.upstreams.append(upstream)
        self.context.begin(self._connect(upstream))
        return upstream

    async def _connect(self, upstream: Upstream) -> None:
        connect = self.context.connect_triton if upstream.is_triton else self.context.connect_server
        try:
            await connect(upstream)
        except OSError:
            upstream.close()
            self.flush()

    # -- the whole --------------------------------------------------------------------------

    def downstream_lost(self) -> None:
        for stream in list(self.downstream.streams.values()):
            self.downstream.forget(stream)
            self.drop(stream.owner)
        for upstream in list(self.upstreams):
            upstream.close_if_done()

    def end_if_done(self) -> None:
        if self.downstream.is_gone and not self.upstreams:
            self.ended.set()

    def close(self) -> None:
        """At once, whatever is open."""
        self.downstream.close(Code.CANCEL)
        for upstream in list(self.upstreams):
            upstream.close()

    def look(self) -> None:
        """Again and again: what takes too long, and what waits for too much that is held?"""
        now, downstream = self.clock(), self.downstream
        seconds, self._looked = min(now - self._looked, _LOOKED_AWAY_SECONDS), now
        for stream in list(downstream.streams.values()):
            exchange = stream.owner
            if now > exchange.deadline:
                self.too_late(exchange)
            elif exchange.is_arriving:
                self.look_at_arriving(exchange, seconds)
            elif stream.queue:
                self.look_at_unread(exchange, now)
        if downstream.is_pressed:
            self.begin_all()
        self.flush()

    def look_closely(self) -> None:
        """Once a second: is the caller still there, and how much does it make us do?"""
        now, downstream = self.clock(), self.downstream
        for endpoint in (downstream, *self.upstreams):
            endpoint.glitches = 0
        if downstream.streams:
            self._busy = now
        if downstream.heard:
            self._heard, downstream.heard, downstream.has_pong = now, False, True
        if not downstream.is_acknowledged and now - self._begun > _GREETING_SECONDS:
            downstream.close(Code.SETTINGS_TIMEOUT)
        elif now - self._heard > _SILENT_SECONDS + _PONG_SECONDS:
            downstream.close()
        elif now - self._heard > _SILENT_SECONDS and downstream.has_pong:
            downstream.ping()
        elif now - self._busy > _IDLE_SECONDS:
            downstream.leave()
        self.flush()
