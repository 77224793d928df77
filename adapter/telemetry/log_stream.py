"""A log stream that never blocks on its reader."""

import io
import logging
import os
import select
import threading
from collections import deque

from adapter.runtime import clock

log = logging.getLogger(__name__)

_MAX_LINES, _MAX_BYTES = 10_000, 4 * 2**20
_POLL_MILLISECONDS = 1000
# To wake the thread for each line costs the event loop more than the line itself.
_GATHER_SECONDS = 0.005


class LogStream(io.TextIOBase):
    """Writes lines in a thread of its own, together where many come. While the reader stands still,
    some thousand lines are buffered; more are dropped and counted, and one line reports the count
    when it reads again.

    `lost`: dropped lines of all streams of this process.
    """

    lost = 0

    def __init__(self, descriptor: int, *, is_terminal: bool = False) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._is_terminal = is_terminal
        self._news = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # of buffered lines and those being written
        self._dropped = 0
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        data = text.encode(errors="backslashreplace")
        with self._news:
            if len(self._lines) >= _MAX_LINES or self._bytes + len(data) > _MAX_BYTES:
                self._dropped += 1
                LogStream.lost += 1
            else:
                self._lines.append(data)
                self._bytes += len(data)
                self._news.notify_all()
        return len(text)

    def drain(self, seconds: float) -> None:
        """Wait until all lines are written, for `seconds` at most. The thread need not be ended: it
        does not keep the process alive.
        """
        with self._news:
            self._news.wait_for(lambda: not self._bytes, seconds)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines)
            clock.sleep(_GATHER_SECONDS)
            with self._news:
                data = b"".join(self._lines)
                self._lines.clear()
            self._put_out(data)
            with self._news:
                self._bytes -= len(data)
                dropped, self._dropped = self._dropped, 0
                self._news.notify_all()
            if dropped:
                log.warning("log.dropped", extra={"lines": dropped})

    def _put_out(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process made the descriptor non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll(_POLL_MILLISECONDS)
            except OSError:  # the reader has closed the pipe
                return
