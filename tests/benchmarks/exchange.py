"""One kept HTTP/1.1 connection with as little of a client as there can be."""

import socket
import time
from typing import Self

_SECONDS = 120


class Exchange:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host = address
        self._socket = socket.create_connection((host, int(port)), _SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def timed(
        self, method: str, path: str, body: bytes = b"", *, times: int = 1, status: int = 200
    ) -> list[float]:
        """Seconds of each call. ValueError when one is not answered with `status`."""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}"
        message = f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body
        return [self._once(message, status) for _ in range(times)]

    def _once(self, message: bytes, status: int) -> float:
        begun = time.perf_counter()
        self._socket.sendall(message)
        answer = bytearray()
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += self._more()
        length = _content_length(answer[:end])
        while not _is_whole(answer, end + 4, length):
            answer += self._more()
        seconds = time.perf_counter() - begun
        if answer[9:12] != str(status).encode():
            raise ValueError(f"{message[:80]!r}: {bytes(answer[:300])!r}")
        return seconds

    def _more(self) -> bytes:
        chunk = self._socket.recv(1 << 18)
        if not chunk:
            raise ConnectionError("the server closed the connection")
        return chunk


def _is_whole(answer: bytearray, start: int, length: int | None) -> bool:
    if length is None:  # chunked
        return answer.endswith(b"\r\n0\r\n\r\n")
    return len(answer) - start >= length


def _content_length(head: bytes) -> int | None:
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
    return None
