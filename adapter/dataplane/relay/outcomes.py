"""What becomes of requests that have gone on: answers, failures, links and callers that go."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.exchange import Exchange, Stage
from adapter.dataplane.relay.frames import Code
from adapter.dataplane.relay.headers import plain_block, status_block
from adapter.dataplane.relay.link import Link
from adapter.dataplane.relay.message import length_of
from adapter.dataplane.relay.ports import Answer, Passage
from adapter.dataplane.relay.site import Site
from adapter.dataplane.relay.wire import Piece
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    NotStarted,
    SlowBody,
)

if TYPE_CHECKING:
    from adapter.dataplane.relay.caller import Caller

_UNAVAILABLE, _DEADLINE_EXCEEDED, _INTERNAL, _UNKNOWN = 14, 4, 13, 2
_LATE = "BackendTimeout"
_NOT_GRPC = b"gRPC only\n"


class Outcomes:
    def __init__(self, site: Site) -> None:
        self.site = site
        self.links: list[Link] = []
        self.caller: Caller
        self.clock = asyncio.get_running_loop().time

    def flush(self) -> None:
        raise NotImplementedError

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
            near, start = exchange.near, answer.head_start
            if start:
                self.caller.out += (start, near.number, answer.block)
            else:
                self.caller.out.append(frames.header_block(near.id, answer.block, end=False))

    def _answered(self, exchange: Exchange, answer: Answer) -> None:
        passage = exchange.passage
        if passage is not None and answer.status != 0:
            status = _UNKNOWN if answer.status is None else answer.status
            self.fail(exchange, passage.fault(status, answer.text))
            return
        exchange.to(Stage.OVER)
        if passage is not None:
            passage.answered()
        near, start = exchange.near, answer.end_start
        if start and not near.queue:
            self.caller.out += (start, near.number, answer.block)
            self.caller.finished(near)
        else:
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
            if exchange.near.queue and exchange.passage is not None and exchange.stuck is None:
                exchange.stuck = (self.clock(), exchange.taken)
                exchange.passage.when_model_goes(partial(self.model_goes, exchange))
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
            self._refuse(exchange, _INTERNAL, f"InternalError: {error}")

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

    def discard(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        """Of what is not gRPC, and is told so at its end."""
        self.caller.credit(exchange.near, len(piece))
        if end:
            self._tell_http(exchange)

    def _tell_http(self, exchange: Exchange) -> None:
        exchange.to(Stage.OVER)
        near, block = exchange.near, plain_block(exchange.call.http_status or 0)
        self.caller.out.append(frames.header_block(near.id, block, end=False))
        self.caller.send(near, _NOT_GRPC, end=True)

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
        self.let_go_of_held(exchange)
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

    def let_go_of_held(self, exchange: Exchange) -> None:
        size = len(exchange.held)
        if size:
            exchange.held = b""
            self.caller.hold(-size)

    # -- links that go ----------------------------------------------------------------------

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

    # -- callers who take their time ---------------------------------------------------------

    def model_goes(self, exchange: Exchange) -> None:
        if exchange.is_arriving:
            self.refuse_arriving(exchange, "the model is being unloaded")
            self.flush()
        elif exchange.hurried is None:
            exchange.hurried = (self.clock(), exchange.taken)

    def look_at_arriving(self, exchange: Exchange, seconds: float) -> None:
        """`seconds`: since it was last looked at."""
        if self.site.is_leaving:
            self.refuse_arriving(exchange, "the adapter is stopping")
        elif self.caller.may_send(exchange.near) and exchange.stage is not Stage.WAITING:
            exchange.waited += seconds
            patience, waited = self.site.patience, exchange.waited
            if waited > patience.slow and exchange.came < waited * patience.rate:
                rate = patience.rate / 2**10
                self.refuse_request(exchange, SlowBody(f"it comes at less than {rate:g} KiB/s"))

    def look_at_unread(self, exchange: Exchange, now: float) -> None:
        """Some of the answer waits for its caller."""
        patience, taken = self.site.patience, exchange.taken
        if self.site.is_leaving and exchange.hurried is None:
            exchange.hurried = (now, taken)
        if exchange.stuck is None or exchange.stuck[1] != taken:
            exchange.stuck = (now, taken)
        is_stuck = exchange.passage is not None and now - exchange.stuck[0] > patience.answer
        if exchange.hurried is not None:
            seconds = now - exchange.hurried[0]
            so_far = taken - exchange.hurried[1]
            is_stuck |= seconds > patience.hurry and so_far < seconds * patience.rate
        if is_stuck:
            self.caller.reset(exchange.near, Code.CANCEL)
            self.drop(exchange)

    def refuse_arriving(self, exchange: Exchange, why: str) -> None:
        error = NotStarted(f"{why}; this request had not wholly come yet")
        self.refuse_request(exchange, error)

    def refuse_request(self, exchange: Exchange, error: AdapterError) -> None:
        if exchange.passage is not None:
            self.fail(exchange, error)
            return
        status, text = self.site.gate.refused(exchange.call.path, error)
        self._leave(exchange)
        self._refuse(exchange, status, text)

    def too_late(self, exchange: Exchange) -> None:
        if exchange.stage in {Stage.ARRIVING, Stage.WAITING}:
            self._leave(exchange)
            self._refuse(exchange, _DEADLINE_EXCEEDED, f"{_LATE}: the request did not come in time")
        elif exchange.passage is None:
            return  # the server beside us has that limit too
        elif not exchange.is_told:
            text, seconds = "Triton did not answer in time", exchange.call.seconds
            if seconds is not None and seconds < self.site.timeout_seconds:
                text = "the caller's deadline has passed"
            self.fail(exchange, BackendTimeout(text))
        elif exchange.near.queue:
            self._refuse(exchange, _DEADLINE_EXCEEDED, f"{_LATE}: the answer was not read in time")
