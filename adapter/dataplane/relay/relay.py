"""One caller's connection, the links that its requests go on to, and what becomes of each request.

A request goes to Triton as it is when the gate lets it through, and else to the server beside us.
The caller's connection and each link are HTTP/2 connections in their own right: a link that goes
fails what it had, and the next request gets another one. Links live on while Triton works on
what a caller has left.
"""

import asyncio

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.caller import Caller
from adapter.dataplane.relay.exchange import Exchange, Stage
from adapter.dataplane.relay.frames import Code
from adapter.dataplane.relay.headers import status_block
from adapter.dataplane.relay.link import Link
from adapter.dataplane.relay.message import PREFIX_BYTES, MessageWatch, Peek, first_name, length_of
from adapter.dataplane.relay.ports import Answer, Call, Passage
from adapter.dataplane.relay.site import Site
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

_NAME_AT_MOST = 2**11  # bytes in which the name is found, if it is
# of a message that goes on when all of it is here; larger ones go on as they come
_GATHERED_BYTES = 2**18


class Relay:
    def __init__(self, site: Site) -> None:
        self.site = site
        self.links: list[Link] = []
        self.caller = Caller(self)
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
        caller, seconds = self.caller, self.site.timeout_seconds
        if call.seconds is not None:
            seconds = min(seconds, call.seconds)
        exchange = Exchange(stream_id, caller.initial_window, call, self._clock() + seconds)
        exchange.near.is_ended = end
        caller.streams[stream_id] = exchange.near
        if call.direct is None or end:
            self._begin_beside(exchange, end=end)

    def request_data(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        if exchange.stage is Stage.ARRIVING:
            self._arrive(exchange, piece, end=end)
        elif exchange.stage is Stage.SENDING:
            self._go_on(exchange, piece, end=end)
        else:
            self.caller.credit(exchange.near, len(piece))

    def _arrive(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        held = exchange.held
        if held or not end:
            held += piece
            self.caller.hold(len(piece))
            if len(held) < exchange.wanted and not end:
                return
        name = self._name_in(held or piece)
        if end or not self._waits(exchange, name):
            self._start(exchange, name, bytes(held) or piece, end=end)

    def _name_in(self, start: Piece | bytearray) -> bytes | Peek:
        return first_name(bytes(start[:_NAME_AT_MOST]), self.site.max_message_bytes)

    def _waits(self, exchange: Exchange, name: bytes | Peek) -> bool:
        """Whether more of it has to come, or may, before it goes on."""
        here = len(exchange.held)
        if name is Peek.MORE:
            exchange.wanted = here + 1
            return True
        size = PREFIX_BYTES + length_of(exchange.held)
        if name is Peek.NO or size < here or size > _GATHERED_BYTES or self.caller.is_pressed:
            return False
        exchange.wanted = size + 1
        return True

    def begin_all(self) -> None:
        """What is gathered goes on, for it keeps out what it waits for."""
        for stream in list(self.caller.streams.values()):
            exchange = stream.exchange
            if exchange.stage is Stage.ARRIVING and exchange.held:
                name = self._name_in(exchange.held)
                if name is not Peek.MORE:
                    self._start(exchange, name, bytes(exchange.held), end=False)

    def _start(self, exchange: Exchange, name: bytes | Peek, piece: Piece, *, end: bool) -> None:
        self._let_go_of_held(exchange)
        block = exchange.call.direct
        if block is not None and self._admits(exchange, name, piece, end=end):
            self._open(exchange, block, is_triton=True, end=False)
            self._send(exchange, piece, end=end)
        else:
            self._begin_beside(exchange, end=False)
            self._go_on(exchange, piece, end=end)

    def _admits(self, exchange: Exchange, name: bytes | Peek, start: Piece, *, end: bool) -> bool:
        if not isinstance(name, bytes):
            return False
        watch = MessageWatch(length_of(start))
        try:
            watch.feed(start[PREFIX_BYTES:])
            if end:
                watch.end()
            exchange.passage = self.site.gate.admit(name, exchange.call.mesh_id)
        except InvalidRequest:
            return False  # told beside us
        if exchange.passage is None:
            return False
        exchange.watch = watch
        exchange.left = PREFIX_BYTES + length_of(start)
        return True

    def _begin_beside(self, exchange: Exchange, *, end: bool) -> None:
        self._open(exchange, exchange.call.served, is_triton=False, end=end)

    def _open(self, exchange: Exchange, block: bytes, *, is_triton: bool, end: bool) -> None:
        link = exchange.link = self._link(is_triton=is_triton)
        exchange.to(Stage.SENDING)
        exchange.far = link.open(exchange, block, end=end)
        if end:
            link.finished(exchange.far)

    def _go_on(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        watch = exchange.watch
        if watch is not None:
            try:
                watch.feed(piece)
                if end:
                    watch.end()
            except InvalidRequest as error:
                self.caller.credit(exchange.near, len(piece))
                self.fail(exchange, error)
                return
        self._send(exchange, piece, end=end)

    def _send(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        link, far = exchange.link, exchange.far
        if link is None or far is None:
            return
        if exchange.watch is not None:
            exchange.left -= len(piece)
            if end:
                piece = exchange.last or piece
            elif not exchange.left and piece:
                piece, exchange.last = piece[:-1], bytes(piece[-1:])
        link.send(far, piece, end=end)

    # -- answers ----------------------------------------------------------------------------

    def answer_head(self, exchange: Exchange, answer: Answer, *, end: bool) -> None:
        if exchange.is_told:
            self._ran_out(exchange)
        elif answer.is_alone == exchange.has_head:
            self.odd_answer(exchange, "a head out of place")
        elif end:
            self._answered(exchange, answer)
        else:
            exchange.has_head = True
            block = frames.header_block(exchange.near.id, answer.block, end=False)
            self.caller.out.append(block)

    def _answered(self, exchange: Exchange, answer: Answer) -> None:
        passage = exchange.passage
        if passage is not None and answer.status != 0:
            status = _UNKNOWN if answer.status is None else answer.status
            self.fail(exchange, passage.fault(status, answer.text))
            return
        exchange.to(Stage.OVER)
        if passage is not None:
            passage.answered()
        near = exchange.near
        self.caller.end(near, frames.header_block(near.id, answer.block, end=True))

    def answer_data(self, exchange: Exchange, piece: Piece) -> None:
        if exchange.passage is not None and not exchange.has_data:
            most = self.site.max_message_bytes
            if length_of(piece) > most:
                text = f"Triton's answer is too large: {length_of(piece)} vs. {most} bytes"
                self._not_taken(exchange, piece, text)
                return
        if exchange.has_head:
            exchange.has_data = True
            self.caller.send(exchange.near, piece)
        else:
            self._not_taken(exchange, piece, "Triton's answer is odd: it has no head")

    def _not_taken(self, exchange: Exchange, piece: Piece, why: str) -> None:
        self.fail(exchange, InferenceFailed(why))
        if exchange.link is not None and exchange.far is not None:
            exchange.link.credit(exchange.far, len(piece))

    def odd_answer(self, exchange: Exchange, why: str) -> None:
        if exchange.is_told:
            self._ran_out(exchange)
        else:
            self.fail(exchange, InferenceFailed(f"Triton's answer is odd: {why}"))

    def _ran_out(self, exchange: Exchange) -> None:
        """Something came of what nobody waits for; perhaps its end."""
        if exchange.stage is Stage.ABANDONED and exchange.far is None:
            exchange.to(Stage.OVER)
            if exchange.passage is not None:
                exchange.passage.ended()

    # -- ends -------------------------------------------------------------------------------

    def fail(self, exchange: Exchange, error: AdapterError) -> None:
        """The caller is told once it is known what the error is called."""
        self._leave(exchange)
        passage = exchange.passage
        if passage is not None:
            self.site.begin(self._tell(exchange, passage, error))
        else:
            self._refuse(exchange, _INTERNAL, str(error))

    async def _tell(self, exchange: Exchange, passage: Passage, error: AdapterError) -> None:
        is_over = exchange.stage is Stage.OVER
        status, text = await passage.failed(error, is_over=is_over)
        if self.caller.streams.get(exchange.near.id) is exchange.near:
            self._refuse(exchange, status, text)
            self.flush()

    def _refuse(self, exchange: Exchange, status: int, text: str) -> None:
        """The answer ends so, whatever of it waits."""
        near = exchange.near
        self.caller.unqueue(near)
        block = status_block(status, text, alone=not exchange.has_head)
        self.caller.end(near, frames.header_block(near.id, block, end=True))

    def drop(self, exchange: Exchange) -> None:
        """The caller wants it no more, and its stream is forgotten."""
        if exchange.is_told:
            return
        self._leave(exchange)
        passage = exchange.passage
        if passage is not None:
            passage.cancelled()
            if exchange.stage is Stage.OVER:
                passage.ended()

    def _leave(self, exchange: Exchange) -> None:
        """Nobody waits for the link any more. Triton goes on with what it has wholly."""
        self._let_go_of_held(exchange)
        self.caller.unqueue(exchange.near)
        link, far = exchange.link, exchange.far
        if link is None or far is None:
            exchange.to(Stage.OVER)
        elif link.is_triton and exchange.stage is Stage.ASKED:
            exchange.to(Stage.ABANDONED)
            if exchange.passage is not None:
                exchange.passage.abandoned()
        else:
            exchange.to(Stage.OVER)
            link.cancel(far)

    def _let_go_of_held(self, exchange: Exchange) -> None:
        size = len(exchange.held)
        if size:
            exchange.held = bytearray()
            self.caller.hold(-size)

    # -- links ------------------------------------------------------------------------------

    def _link(self, *, is_triton: bool) -> Link:
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

    def link_lost(self, link: Link) -> None:
        self.links.remove(link)
        why = "the connection to Triton broke" if link.was_connected else "Triton cannot be reached"
        for stream in list(link.streams.values()):
            link.forget(stream)
            self.link_gave_up(stream.exchange, why, delivered=link.was_connected)

    def link_gave_up(self, exchange: Exchange, why: str, *, delivered: bool) -> None:
        if exchange.is_told:
            self._ran_out(exchange)
        elif exchange.passage is not None:
            self.fail(exchange, BackendUnavailable(why, delivered=delivered))
        else:
            self._leave(exchange)
            self._refuse(exchange, _UNAVAILABLE, f"BackendUnavailable: {why}")

    def link_reset(self, exchange: Exchange, code: int) -> None:
        if exchange.is_told:
            self._ran_out(exchange)
        elif exchange.passage is None:
            self._leave(exchange)
            self.caller.reset(exchange.near, code)
        elif code == Code.REFUSED_STREAM:
            self.fail(exchange, BackendUnavailable("Triton refused the stream", delivered=False))
        else:
            self.fail(exchange, InferenceFailed(f"Triton gave the request up (HTTP/2: {code})"))

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
        now, caller = self._clock(), self.caller
        for stream in list(caller.streams.values()):
            if now > stream.exchange.deadline:
                self._too_late(stream.exchange)
        if caller.is_pressed:
            self.begin_all()
        for endpoint in (caller, *self.links):
            endpoint.give()
        self.flush()

    def look_closely(self) -> None:
        """Once a second: is the caller still there, and how much does it make us do?"""
        now, caller = self._clock(), self.caller
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

    def _too_late(self, exchange: Exchange) -> None:
        if exchange.stage is Stage.ARRIVING:
            self._leave(exchange)
            self._refuse(exchange, _DEADLINE_EXCEEDED, "the request did not come in time")
        elif exchange.passage is None:
            return  # the server beside us has that limit too
        elif not exchange.is_told:
            self.fail(exchange, BackendTimeout("Triton did not answer in time"))
        elif exchange.near.queue:
            self._refuse(exchange, _DEADLINE_EXCEEDED, "the answer was not read in time")
