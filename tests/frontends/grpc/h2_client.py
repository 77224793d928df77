"""A gRPC client made of `h2`: an HTTP/2 of others, whose frames go out as a test orders them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

from tests.frontends.grpc.proxy_listener import INFER, SECONDS, prefixed


@dataclass
class Answer:
    data: bytes = b""
    status: int | None = None
    text: str = ""
    reset: int | None = None
    headers: list[dict[str, str]] = field(default_factory=list)  # one of each HEADERS frame
    is_over: bool = False


@dataclass
class H2Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http2: H2Connection = field(
        default_factory=lambda: H2Connection(H2Configuration(header_encoding="utf-8"))
    )
    answers: dict[int, Answer] = field(default_factory=dict)

    def open(self) -> None:
        self.http2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.writer.write(self.http2.data_to_send())

    def head(self, stream_id: int) -> None:
        """HEADERS of an inference."""
        self.answers[stream_id] = Answer()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", INFER),
            (":authority", "x"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
        self.http2.send_headers(stream_id, headers)
        self.flush()

    def data(self, stream_id: int, message: bytes, *, pieces: int = 1) -> None:
        """The message, in so many DATA frames, the last with END_STREAM."""
        for piece, end in cut(prefixed(message), pieces):
            self.piece(stream_id, piece, end=end)

    def piece(self, stream_id: int, piece: bytes, *, end: bool) -> None:
        self.http2.send_data(stream_id, piece, end_stream=end)
        self.flush()

    async def until_all(self) -> dict[int, Answer]:
        """All answers are here; those that do not come within SECONDS are not over."""
        try:
            async with asyncio.timeout(SECONDS):
                while not all(answer.is_over for answer in self.answers.values()):
                    if not (data := await self.reader.read(2**16)):
                        break
                    for event in self.http2.receive_data(data):
                        self._take(event)
                    self.flush()
        except TimeoutError:
            pass
        return self.answers

    def _take(self, event: object) -> None:
        match event:
            case DataReceived():
                self.answers[event.stream_id].data += event.data
                size = event.flow_controlled_length
                self.http2.acknowledge_received_data(size, event.stream_id)
            case ResponseReceived() | TrailersReceived():
                found = dict(event.headers)
                self.answers[event.stream_id].headers.append(found)
                if "grpc-status" in found:
                    self.answers[event.stream_id].status = int(found["grpc-status"])
                    self.answers[event.stream_id].text = found.get("grpc-message", "")
            case StreamEnded():
                self.answers[event.stream_id].is_over = True
            case StreamReset():
                answer = self.answers[event.stream_id]
                answer.reset, answer.is_over = event.error_code, True


def cut(message: bytes, pieces: int) -> list[tuple[bytes, bool]]:
    size = -(-len(message) // pieces)
    found = [message[at : at + size] for at in range(0, len(message), size)]
    return [(piece, i == len(found) - 1) for i, piece in enumerate(found)]


@asynccontextmanager
async def h2_to(address: str) -> AsyncIterator[H2Client]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    client = H2Client(reader, writer)
    client.open()
    try:
        yield client
    finally:
        writer.close()
