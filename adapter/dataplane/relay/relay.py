"""One caller's connection, the links that its requests go on to, and what becomes of each request.

A request goes to Triton as it is when the gate lets it through, and else to the server beside us.
The caller's connection and each link are HTTP/2 connections in their own right: a link that goes
fails what it had, and the next request gets another one. Links live on while Triton works on
what a caller has left.
"""

import asyncio

from adapter.dataplane.relay.arriving import Arriving
from adapter.dataplane.relay.caller import Caller
from adapter.dataplane.relay.frames import Code
from adapter.dataplane.relay.link import Link
from adapter.dataplane.relay.site import Site

_GREETING_SECONDS, _SILENT_SECONDS, _PONG_SECONDS, _IDLE_SECONDS = 15.0, 60.0, 20.0, 3600.0
_LOOKED_AWAY_SECONDS = 0.5  # longer, and it is not the callers who were slow


class Relay(Arriving):
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.caller = Caller(self)
        self.ended = asyncio.Event()
        self._begun = self._heard = self._busy = self._looked = self.clock()

    def flush(self) -> None:
        self.caller.give()
        if self.caller.out:
            self.caller.flush()
        for link in self.links:
            link.give()
            if link.out:
                link.flush()

    # -- links ------------------------------------------------------------------------------

    def link(self, *, is_triton: bool) -> Link:
        for link in self.links:
            if link.is_triton is is_triton and link.takes_more:
                return link
        link = Link(self, is_triton=is_triton)
        self.links.append(link)
        self.site.begin(self._connect(link))
        return link

    async def _connect(self, link: Link) -> None:
        connect = self.site.connect_triton if link.is_triton else self.site.connect_server
        try:
            await connect(link)
        except OSError:
            link.close()
            self.flush()

    # -- the whole --------------------------------------------------------------------------

    def caller_lost(self) -> None:
        for stream in list(self.caller.streams.values()):
            self.caller.forget(stream)
            self.drop(stream.exchange)
        for link in list(self.links):
            link.close_if_done()

    def end_if_done(self) -> None:
        if self.caller.is_gone and not self.links:
            self.ended.set()

    def close(self) -> None:
        """At once, whatever is open."""
        self.caller.close(Code.CANCEL)
        for link in list(self.links):
            link.close()

    def look(self) -> None:
        """Again and again: what takes too long, and what waits for too much that is held?"""
        now, caller = self.clock(), self.caller
        seconds, self._looked = min(now - self._looked, _LOOKED_AWAY_SECONDS), now
        for stream in list(caller.streams.values()):
            exchange = stream.exchange
            if now > exchange.deadline:
                self.too_late(exchange)
            elif exchange.is_arriving:
                self.look_at_arriving(exchange, seconds)
            elif stream.queue:
                self.look_at_unread(exchange, now)
        if caller.is_pressed:
            self.begin_all()
        self.flush()

    def look_closely(self) -> None:
        """Once a second: is the caller still there, and how much does it make us do?"""
        now, caller = self.clock(), self.caller
        for endpoint in (caller, *self.links):
            endpoint.chores = 0
        if caller.streams:
            self._busy = now
        if caller.heard:
            self._heard, caller.heard, caller.has_pong = now, False, True
        if not caller.is_acknowledged and now - self._begun > _GREETING_SECONDS:
            caller.close(Code.SETTINGS_TIMEOUT)
        elif now - self._heard > _SILENT_SECONDS + _PONG_SECONDS:
            caller.close()
        elif now - self._heard > _SILENT_SECONDS and caller.has_pong:
            caller.ping()
        elif now - self._busy > _IDLE_SECONDS:
            caller.leave()
        self.flush()
