"""What one caller's connection is made of, and what becomes of each of its requests.

A request goes to Triton as it is when the gate lets it through, and else to the server beside us.
When either of them goes, the caller is told so with GOAWAY, as Triton itself would tell it: what is
open goes on, what was on its way is served beside us, and new requests come on a new connection.
"""

import asyncio
from typing import TypeVar

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.caller import Caller
from adapter.dataplane.relay.exchange import Exchange
from adapter.dataplane.relay.frames import Code
from adapter.dataplane.relay.headers import status_block
from adapter.dataplane.relay.link import Link
from adapter.dataplane.relay.message import PREFIX_BYTES, MessageWatch, Peek, first_name, length_of
from adapter.dataplane.relay.ports import Answer, Call
from adapter.dataplane.relay.served import Served
from adapter.dataplane.relay.site import Connect, Site
from adapter.dataplane.relay.triton import Triton
from adapter.dataplane.relay.wire import Piece
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    InvalidRequest,
)

_GREETING_SECONDS, _SILENT_SECONDS, _PONG_SECONDS, _IDLE_SECONDS = 15.0, 60.0, 20.0, 3600.0
_UNAVAILABLE, _DEADLINE_EXCEEDED, _INTERNAL, _UNKNOWN = 14, 4, 13, 2
L = TypeVar("L", bound=Link)

_NAME_AT_MOST = 2**11  # bytes in which the name is found, if it is


class Relay:
    def __init__(self, site: Site) -> None:
        self.site = site
        self.caller = Caller(self)
        self.triton: Triton | None = None
        self.server: Served | None = None
        self.links: list[Link] = []
        self._is_triton_going = False
        self.ended = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._begun = self._heard = self._busy = self._clock()

    def flush(self) -> None:
        if self.caller.out:
            self.caller.flush()
        for link in self.links:
            if link.out:
                link.flush()

    # -- requests ---------------------------------------------------------------------------

    def begin(self, stream_id: int, call: Call, *, end: bool) -> None:
        caller, site = self.caller, self.site
        seconds = site.timeout_seconds
        if call.seconds is not None:
            seconds = min(seconds, call.seconds)
        exchange = Exchange(stream_id, call, caller.initial_window, self._clock() + seconds)
        caller.exchanges[stream_id] = exchange
        if call.direct is None or end:
            exchange.is_asked = end
            self._go_slow(exchange, end=end)

    def decide(self, exchange: Exchange, start: Piece, *, end: bool) -> bool | None:
        """Whether a request that starts so goes straight; None when more of it has to come."""
        name = first_name(bytes(start[:_NAME_AT_MOST]), self.site.max_message_bytes)
        if name is Peek.MORE and not end:
            return None
        block = exchange.call.direct
        if block is None or not self._admits(exchange, name, start, end=end):
            self._go_slow(exchange, end=False)
            return False
        if self.triton is None:
            self.triton = self._connected(Triton(self), self.site.connect_triton)
        self._go(exchange, self.triton, block, end=False)
        if exchange.watch is not None and not end:
            self.caller.watches[exchange.id] = exchange.watch
        return True

    def _admits(self, exchange: Exchange, name: bytes | Peek, start: Piece, *, end: bool) -> bool:
        """A new connection to Triton would know nothing of the windows that the caller has."""
        if not isinstance(name, bytes) or self._is_triton_going:
            return False
        watch = MessageWatch(length_of(start))
        try:
            watch.feed(start[PREFIX_BYTES:])
            if end:
                watch.end()
            exchange.passage = self.site.gate.admit(name, exchange.call.mesh_id)
        except InvalidRequest:
            return False  # told on the slow way
        if exchange.passage is None:
            return False
        exchange.watch = watch
        return True

    def _go_slow(self, exchange: Exchange, *, end: bool) -> None:
        if self.server is None:
            self.server = self._connected(Served(self), self.site.connect_server)
        exchange.upload = self.server.new_upload()
        self._go(exchange, self.server, exchange.call.served, end=end)

    def _go(self, exchange: Exchange, link: Link, block: bytes, *, end: bool) -> None:
        exchange.link = link
        link.out.append(frames.header_block(exchange.id, block, end=end))
        if exchange.granted:
            link.out.append(frames.window_update(exchange.id, exchange.granted))

    # -- answers ----------------------------------------------------------------------------

    def answer_head(self, exchange: Exchange, answer: Answer, *, end: bool) -> None:
        if end and exchange.passage is not None and answer.status != 0:
            status = _UNKNOWN if answer.status is None else answer.status
            self.fail(exchange, exchange.passage.fault(status, answer.text))
            return
        exchange.has_head = True
        self.caller.send(
            exchange.id, frames.header_block(exchange.id, answer.block, end=end), 0, exchange.link
        )
        if end:
            self.answered(exchange)

    def answered(self, exchange: Exchange) -> None:
        """The caller has the end of its answer, or it waits for a window."""
        passage, exchange.passage = exchange.passage, None
        if passage is not None:
            passage.answered()
        exchange.is_over = True
        if not exchange.is_asked:
            self._release(exchange, Code.NO_ERROR)
        self._ended(exchange)

    def fail(self, exchange: Exchange, error: AdapterError) -> None:
        """The caller is told once it is known what the error is called."""
        exchange.is_over = True
        self._release(exchange, Code.CANCEL)
        if exchange.passage is not None:
            self.site.begin(self._tell(exchange, error))
        else:
            self._refuse(exchange, _INTERNAL, str(error))

    async def _tell(self, exchange: Exchange, error: AdapterError) -> None:
        passage = exchange.passage
        assert passage is not None  # noqa: S101
        status, text = await passage.failed(error)
        if self.caller.exchanges.get(exchange.id) is exchange:
            self._refuse(exchange, status, text)
            self.flush()

    def _refuse(self, exchange: Exchange, status: int, text: str) -> None:
        exchange.is_over = True
        block = status_block(status, text, alone=not exchange.has_head)
        self.caller.send(exchange.id, frames.header_block(exchange.id, block, end=True), 0)
        self._ended(exchange)

    # -- ends -------------------------------------------------------------------------------

    def _release(self, exchange: Exchange, code: int) -> None:
        """What was held counts as read; the link is told when it still works for it."""
        if exchange.held:
            self.caller.credit(len(exchange.held))
            exchange.held = b""
        self.caller.watches.pop(exchange.id, None)
        link = exchange.link
        if link is not None and not (exchange.is_answered and exchange.is_asked):
            link.release(exchange, code)

    def _ended(self, exchange: Exchange) -> None:
        """Section 8.1: of a request that has been answered the rest is not needed."""
        if not exchange.is_asked:
            reset = frames.reset(exchange.id, Code.NO_ERROR)
            self.caller.send(exchange.id, reset, 0)
            self.caller.note_reset(exchange.id)
        self._forget(exchange)

    def _forget(self, exchange: Exchange) -> None:
        self._busy = self._clock()
        self.caller.forget(exchange)
        self.close_if_done()

    def close_if_done(self) -> None:
        caller = self.caller
        if not (caller.is_taking or caller.exchanges or caller.has_waiting):
            asyncio.get_running_loop().call_soon(caller.close)

    def drop(self, exchange: Exchange, code: int) -> None:
        """The caller wants it no more."""
        if not exchange.is_over:
            exchange.is_over = True
            self._release(exchange, code)
            if exchange.passage is not None:
                exchange.passage.cancelled()
        self._forget(exchange)

    # -- links ------------------------------------------------------------------------------

    def _connected(self, link: L, connect: Connect) -> L:
        self.links.append(link)
        self.site.begin(self._connect(link, connect))
        return link

    async def _connect(self, link: Link, connect: Connect) -> None:
        try:
            await connect(link)
        except OSError:
            link.close()
            self.flush()

    def link_lost(self, link: Link) -> None:
        self.links.remove(link)
        link.take_all_settings()
        self.caller.read_on(is_wanted=self.may_read())
        if link is self.triton:
            self.triton = None
            self.caller.open_again()
        why = "the connection to Triton broke" if link.was_connected else "Triton cannot be reached"
        self._abandon(link, -1, why, delivered=link.was_connected)

    def may_read(self) -> bool:
        """What the caller sends has to wait where a link takes it too slowly."""
        return not any(link.is_paused for link in self.links)

    def link_going(self, link: Link, last_stream_id: int) -> None:
        self._abandon(link, last_stream_id, "Triton is going away", delivered=False)

    def _abandon(self, link: Link, last_id: int, why: str, *, delivered: bool) -> None:
        if isinstance(link, Triton):
            self._is_triton_going = True
        elif link is self.server:
            self.server = None
        for exchange in list(self.caller.exchanges.values()):
            if exchange.link is link and exchange.id > last_id and not exchange.is_over:
                exchange.is_answered = exchange.is_asked
                if exchange.passage is not None:
                    self.fail(exchange, BackendUnavailable(why, delivered=delivered))
                else:
                    link.release(exchange, Code.CANCEL)
                    self._refuse(exchange, _UNAVAILABLE, f"BackendUnavailable: {why}")
        self.caller.leave()

    def link_reset(self, exchange: Exchange, code: int) -> None:
        if exchange.passage is None:
            self.caller.send(exchange.id, frames.reset(exchange.id, code), 0)
            self.caller.note_reset(exchange.id)
            self.drop(exchange, code)
        elif code == Code.REFUSED_STREAM:
            self.fail(exchange, BackendUnavailable("Triton refused the stream", delivered=False))
        else:
            self.fail(exchange, InferenceFailed(f"Triton gave the request up (HTTP/2: {code})"))

    # -- the whole --------------------------------------------------------------------------

    def caller_lost(self) -> None:
        for exchange in list(self.caller.exchanges.values()):
            self.drop(exchange, Code.CANCEL)
        for link in list(self.links):
            link.close()

    def look(self) -> None:
        """Again and again: what takes too long?"""
        now = self._clock()
        for exchange in list(self.caller.exchanges.values()):
            if now > exchange.deadline:
                self._too_late(exchange)
        self.flush()

    def look_closely(self) -> None:
        """Once a second: is the caller still there, and how much does it make us do?"""
        now, caller = self._clock(), self.caller
        for wire in (caller, *self.links):
            wire.chores = 0
        if caller.heard:
            self._heard, caller.heard, caller.has_pong = now, False, True
        if not caller.is_acknowledged and now - self._begun > _GREETING_SECONDS:
            caller.close(Code.SETTINGS_TIMEOUT)
        elif now - self._heard > _SILENT_SECONDS + _PONG_SECONDS:
            caller.close()
        elif now - self._heard > _SILENT_SECONDS and caller.has_pong:
            caller.ping()
        elif not caller.exchanges and now - self._busy > _IDLE_SECONDS:
            caller.leave()
        self.flush()

    def _too_late(self, exchange: Exchange) -> None:
        if exchange.is_over:
            return
        if exchange.passage is not None:
            self.fail(exchange, BackendTimeout("Triton did not answer in time"))
        elif exchange.link is None:
            self._release(exchange, Code.CANCEL)
            self._refuse(exchange, _DEADLINE_EXCEEDED, "the request did not come in time")
