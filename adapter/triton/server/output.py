"""Logs the output of tritonserver and its models, up to a rate limit."""

import logging
import os
import re
import select
import threading
from collections import deque
from pathlib import Path

from adapter.runtime import clock

_log = logging.getLogger("adapter.triton")

_LINES_PER_SECOND = 500
_KEPT_LINES = 40
_SHOWN_LINES = 20
_MAX_LINE_BYTES = 8192
_READ_BYTES = 2**16
_TAIL_BYTES = 2**14  # the end of dropped output, from which the last lines are kept
# The pause after lines were dropped: the process that prints can wait, the event loop cannot.
# Beside a process that prints without end a pause of 2 ms cost 7 % of a CPU, much of it with the
# interpreter lock, and this one costs 1.4 %.
_PAUSE_SECONDS = 0.02
_SUM_SECONDS = 1.0
_POLL_MILLISECONDS = 500
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR}
_PREFIX = re.compile(r"([IWE])\d{4} ")
# Triton starts with tables of options, backends and models. A model may print lines like these.
_TABLE_BORDER = re.compile(r"\+-[-+]*\+\s*$")
_TABLE_TITLE = re.compile(r"I\d{4} \S+ +\d+ (?:server|tritonserver)\.cc:\d+\] *$")
# CUDA says first that it finds no GPU, and then more, some of it as a warning or an error.
_NO_GPU = re.compile(
    r"Unable to allocate pinned system memory.*"
    r"(?:CUDA driver version is insufficient|no CUDA-capable device)"
)
_FOLLOWS = re.compile(
    r"CUDA memory pool disabled|CudaDriverHelper has not been initialized"
    r"|Failed to initialize NVML|DCGM unable to start"
)
# Triton's line about the folder into which the adapter itself unpacks a model.
_OWN_FOLDER = re.compile(r"ignore version directory '\.unpacked'")
_DRIVER = Path("/proc/driver/nvidia/version")
_USAGE = re.compile(r"Usage: |\s|[\w /]+:$")


class Output:
    """Reads a pipe in a thread of its own until all writers have closed it, or until `close`.

    A model may print millions of lines a second. Some hundred a second are logged; the others are
    dropped, and summed up in one line a second.
    """

    def __init__(self, pipe: int) -> None:
        """Take ownership of the descriptor. Raises RuntimeError if no thread can be started."""
        self._pipe = pipe
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._lock = threading.Lock()  # for _last
        self._is_usage = False
        self._is_table = False
        self._has_no_gpu = False
        self._is_closed = False
        self._tokens = float(_LINES_PER_SECOND)
        self._filled_at = clock.monotonic()
        self._summed_at = self._filled_at
        self._dropped = 0
        self._thread = threading.Thread(target=self._read, name="triton-log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(pipe)
            raise

    @property
    def is_over(self) -> bool:
        """Return whether all was read and the descriptor is closed."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop reading. Returns at once; the thread ends within half a second."""
        self._is_closed = True

    def complaint(self) -> str:
        """Return the last line, which is the reason if Triton gave up, then the lines before it."""
        with self._lock:
            lines = list(self._last)
        return "\n".join([lines[-1] if lines else "it said nothing", *lines[-_SHOWN_LINES:]])

    def _read(self) -> None:
        """Read until the end or `close`; run by the thread."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        partial_line = b""
        try:
            while not self._is_closed:
                if poll.poll(_POLL_MILLISECONDS):
                    chunk = os.read(self._pipe, _READ_BYTES)
                    if not chunk:
                        break
                    partial_line = self._take(partial_line + chunk)
                self._sum_up(_SUM_SECONDS)
            self._pass_on(partial_line)
            self._sum_up(0)
        finally:
            os.close(self._pipe)

    def _take(self, data: bytes) -> bytes:
        """Log whole lines up to the rate limit; return the incomplete last line."""
        self._is_usage = self._is_usage or b"Usage: " in data
        limit = self._refill_tokens()
        *lines, rest = data.split(b"\n", limit)
        self._tokens -= len(lines)
        for line in lines:
            self._pass_on(line)
        if b"\n" in rest:
            dropped, _, rest = rest.rpartition(b"\n")
            self._drop(dropped)
        elif len(rest) > _MAX_LINE_BYTES:  # a line without end
            clock.sleep(_PAUSE_SECONDS)
        return rest[:_MAX_LINE_BYTES]

    def _refill_tokens(self) -> int:
        """Return how many lines may be logged now."""
        now = clock.monotonic()
        new_tokens = (now - self._filled_at) * _LINES_PER_SECOND
        self._tokens = min(_LINES_PER_SECOND, self._tokens + new_tokens)
        self._filled_at = now
        return int(self._tokens)

    def _drop(self, lines: bytes) -> None:
        """Count the lines, keep the last ones for `complaint`, and slow the writer down."""
        self._dropped += lines.count(b"\n") + 1
        for line in lines[-_TAIL_BYTES:].split(b"\n")[-_KEPT_LINES:]:
            self._keep(_decode(line))
        clock.sleep(_PAUSE_SECONDS)

    def _sum_up(self, seconds: float) -> None:
        """Log how many lines were dropped, once in `seconds`."""
        now = clock.monotonic()
        if self._dropped and now - self._summed_at >= seconds:
            _log.warning("triton.log_dropped", extra={"lines": self._dropped})
            self._dropped = 0
            self._summed_at = now

    def _pass_on(self, line: bytes) -> None:
        """Log one line, unless it is one of the usage."""
        text = _decode(line)
        if self._keep(text):
            _log.log(self._choose_level(text), "triton.log", extra={"line": text})

    def _choose_level(self, text: str) -> int:
        """Return Triton's own level, but debug for its tables, for lines about the adapter's own
        folder, and for those about a missing GPU, which is logged once as an event of its own.
        """
        is_border = _TABLE_BORDER.match(text) is not None
        self._is_table = is_border or (self._is_table and text.startswith("|"))
        if self._is_table or _TABLE_TITLE.match(text):
            return logging.DEBUG
        if match := _NO_GPU.search(text):
            self._has_no_gpu = True
            # where there is a driver, somebody expects a GPU
            level = logging.WARNING if _DRIVER.exists() else logging.INFO
            reason = text[match.start() :].rstrip('"')
            _log.log(level, "triton.no_gpu", extra={"reason": reason})
            return logging.DEBUG
        if (self._has_no_gpu and _FOLLOWS.search(text)) or _OWN_FOLDER.search(text):
            return logging.DEBUG
        prefix = _PREFIX.match(text)
        return _LEVELS[prefix[1]] if prefix else logging.INFO

    def _keep(self, line: str) -> bool:
        """Keep the line for `complaint`. Return False for a line that is not worth logging."""
        # 400 lines of options follow or precede a complaint about one of them
        if not line or (self._is_usage and _USAGE.match(line)):
            return False
        if line[0] not in "|+":  # no line of the table of all options
            with self._lock:
                self._last.append(line)
        return True


def _decode(line: bytes) -> str:
    """Return a line as text, cut to the length that is logged."""
    return line[:_MAX_LINE_BYTES].decode(errors="replace")
