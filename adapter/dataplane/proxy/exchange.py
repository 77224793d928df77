"""One request of a caller: from its head until both sides have done with it."""

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from adapter.dataplane.proxy.routing import Call, DirectCall
from adapter.protocols.http2.flow_control import Stream
from adapter.protocols.http2.transport import Piece
from adapter.protocols.protobuf import PREFIX_BYTES, NameScanner

if TYPE_CHECKING:
    from adapter.core.inflight import Claim


class Stage(Enum):
    """`follows`: what may, by the table `FOLLOWS`; to look there costs the hash of an Enum."""

    follows: tuple["Stage", ...]

    ARRIVING = "nothing of it has gone on; what came is held"
    WAITING = "the same, and it is not its turn: too much is on its way to Triton"
    SENDING = "its head has gone on; not all of it"
    ASKED = "all of it has gone on"
    ABANDONED = "all of it has gone on, nobody waits for the answer, and that is not all here"
    OVER = "the caller has the end, or it is on its way; nothing more comes of the link"


FOLLOWS = {
    Stage.ARRIVING: {Stage.WAITING, Stage.SENDING, Stage.ASKED, Stage.OVER},
    Stage.WAITING: {Stage.SENDING, Stage.OVER},
    Stage.SENDING: {Stage.ASKED, Stage.OVER},
    Stage.ASKED: {Stage.ABANDONED, Stage.OVER},
    Stage.ABANDONED: {Stage.OVER},
    Stage.OVER: {Stage.OVER},
}


for _stage, _after in FOLLOWS.items():
    _stage.follows = tuple(_after)

_ABANDONED, _OVER = Stage.ABANDONED, Stage.OVER
_ARRIVING = {Stage.ARRIVING, Stage.WAITING, Stage.SENDING}


class Onward(Protocol):
    """The connection that a request goes on by."""

    is_triton: bool

    def send(self, stream: "Stream[Exchange]", piece: Piece, *, end: bool = False) -> None: ...
    def credit(self, stream: "Stream[Exchange]", size: int) -> None: ...
    def cancel(self, stream: "Stream[Exchange]") -> None: ...
    def hold(self, size: int) -> None: ...


class Exchange:
    """`near` is its stream at the caller, `far` that at `upstream`, which is Triton or the server
    beside us; `direct_call` is there when it is Triton. `deadline`: of the event loop's clock.

    `held`: what came while it was ARRIVING or WAITING; below `wanted` bytes there is nothing to
    decide.
    `left`: bytes of the message that are still to come; `last`: its last byte, which goes on with
    the end alone, so that Triton has all of a request or knows of none. `claim`: its part of what
    may be on its way to Triton, where it is large.
    `came`: bytes of the request, in `waited` seconds; `taken`: bytes of the answer.
    """

    __slots__ = (
        "call",
        "came",
        "claim",
        "deadline",
        "direct_call",
        "far",
        "has_data",
        "has_head",
        "held",
        "hurried",
        "last",
        "left",
        "near",
        "stage",
        "stuck",
        "taken",
        "upstream",
        "waited",
        "wanted",
        "watch",
    )

    def __init__(self, stream_id: int, send_window: int, call: Call, deadline: float) -> None:
        self.call = call
        self.deadline = deadline
        self.stage = Stage.ARRIVING
        self.near: Stream[Exchange] = Stream(stream_id, self, send_window)
        self.far: Stream[Exchange] | None = None
        self.upstream: Onward | None = None
        self.direct_call: DirectCall | None = None
        self.watch: NameScanner | None = None
        self.claim: Claim | None = None
        self.held: bytearray | bytes = b""
        self.wanted = PREFIX_BYTES + 2
        self.left = 0
        self.last: bytes | memoryview = b""
        self.came = self.taken = 0
        self.waited = 0.0
        # when that was seen last, and how much had been taken then
        self.stuck: tuple[float, int] | None = None
        self.hurried: tuple[float, int] | None = None
        self.has_head = self.has_data = False  # of the answer, the caller has

    @property
    def is_told(self) -> bool:
        """The caller waits for nothing more of the link."""
        return self.stage is _OVER or self.stage is _ABANDONED

    @property
    def is_arriving(self) -> bool:
        """It is an inference, of one message, of which its caller has more to send."""
        is_one = self.stage in _ARRIVING and self.call.direct is not None
        return is_one and not self.near.is_ended

    def to(self, stage: Stage) -> None:
        if stage not in self.stage.follows:
            raise RuntimeError(f"{self.stage.name} is not followed by {stage.name}")
        self.stage = stage
        if self.claim is not None and stage not in _ARRIVING:
            self.claim.end()
