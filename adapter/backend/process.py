"""One run of the tritonserver process: its start, its log, its end, and the processes below it."""

import asyncio
import logging
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from adapter.errors import BackendUnavailable

_log = logging.getLogger("adapter.triton")

_STOP_SECONDS = 10.0
_LOG_END_SECONDS = 1.0
_ORPHANS_SECONDS, _ORPHANS_POLL_SECONDS = 1.0, 0.02
_KEPT_LINES = 40
_SHOWN_LINES = 20
_MAX_LINE_BYTES = 8192
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR}
_PREFIX = re.compile(r"([IWE])\d{4} ")
_USAGE = re.compile(r"Usage: |\s|[\w /]+:$")

# Between fork and exec nothing may run here, because of threads; so a second, tiny Python prepares
# what follows and then becomes tritonserver. It leaves a guard behind, whose stdin is a pipe that
# only the adapter holds: once that is closed, by us or by our death, the guard kills the whole
# process group. PR_SET_PDEATHSIG would reach the server alone: a stub notices a dead server after
# 1 to 2 s, never while a call in it holds Python's lock, and what a model has started never does.
_LAUNCHER = """
import contextlib, glob, os, signal, sys
group = os.getpid()
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        os.read(0, 1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        for region in glob.glob("/dev/shm/" + sys.argv[1] + "*"):
            os.unlink(region)
    os._exit(0)
os.wait()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerProcess:
    """One run of the process, its log, and its process group."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        lifeline: ExitStack,
        log: asyncio.StreamReader,
        log_pipe: asyncio.ReadTransport,
    ) -> None:
        self.started_at = time.monotonic()
        self._process = process
        self._lifeline = lifeline
        self._log_pipe = log_pipe
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._logging = asyncio.create_task(self._pass_on(log), name="triton-log")

    @classmethod
    async def spawn(
        cls, command: Sequence[str], environment: Mapping[str, str], memory_prefix: str
    ) -> Self:
        """Start it. `memory_prefix` begins the names of its shared memory regions.

        A session of its own keeps a terminal's Ctrl-C away: we drain first.
        """
        log = asyncio.StreamReader()
        # not asyncio's own pipes: with those, wait() waits for the stubs too, which inherit them
        ours, theirs = os.pipe()
        log_pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(log), os.fdopen(ours, "rb", buffering=0)
        )
        guarded, held = os.pipe()
        with ExitStack() as lifeline:
            lifeline.callback(os.close, held)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", "-c", _LAUNCHER, memory_prefix, *command),
                    env=environment,
                    stdin=guarded,
                    stdout=theirs,
                    stderr=theirs,
                    start_new_session=True,
                )
            except OSError as error:
                raise BackendUnavailable(
                    f"tritonserver cannot be started: {error}", delivered=False
                ) from error
            finally:
                os.close(guarded)
                os.close(theirs)
            return cls(process, lifeline.pop_all(), log, log_pipe)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process.returncode is None else None

    async def ended(self) -> str:
        """Wait for the end, let the guard take the rest along, and say how it ended."""
        code = await self._process.wait()
        self._lifeline.close()
        # The guard holds the pipe until it is done. So may, for ever, what a model has moved to
        # another session.
        await asyncio.wait([self._logging], timeout=_LOG_END_SECONDS)
        self._log_pipe.close()
        await _reap_orphans()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    async def stop(self) -> None:
        for request, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, None)):
            with suppress(ProcessLookupError):
                self._process.send_signal(request)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended(), seconds)
                return

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def complaint(self) -> str:
        """The last thing it said, which is the reason when it gave up, then the lines before."""
        last = self._lines[-1] if self._lines else "it said nothing"
        return "\n".join([last, *list(self._lines)[-_SHOWN_LINES:]])

    async def _pass_on(self, log: asyncio.StreamReader) -> None:
        is_usage = False
        async for line in _lines(log):
            is_usage = is_usage or line.startswith("Usage: ")
            if not line or (is_usage and _USAGE.match(line)):
                continue  # 400 lines of options follow or precede a complaint about one
            if line[0] not in "|+":  # the table of all options
                self._lines.append(line)
            prefix = _PREFIX.match(line)
            _log.log(
                _LEVELS[prefix[1]] if prefix else logging.INFO, "triton.log", extra={"line": line}
            )


async def _reap_orphans() -> None:
    """As the first process of a container we are given what the server leaves behind, dying.

    There is one server at a time and asyncio has had its end: nobody else waits for these. What a
    model has moved to another session may live on, so this does not wait for all.
    """
    if os.getpid() == 1:
        with suppress(ChildProcessError, TimeoutError):
            async with asyncio.timeout(_ORPHANS_SECONDS):
                while True:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:  # noqa: ASYNC222 - does not block
                        await asyncio.sleep(_ORPHANS_POLL_SECONDS)


async def _lines(log: asyncio.StreamReader) -> AsyncIterator[str]:
    """Whole lines; of a very long one only the beginning, whatever its length."""
    begun = b""
    while chunk := await log.read(1 << 16):
        *whole, begun = (begun + chunk).split(b"\n")
        for line in whole:
            yield line[:_MAX_LINE_BYTES].decode(errors="replace")
        begun = begun[:_MAX_LINE_BYTES]
    yield begun.decode(errors="replace")


def descendants(ancestor: int) -> list[int]:
    """Living ones only: a zombie holds nothing."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, OSError):  # no process, or it has just ended
            pid = int(entry.name)
            # the name, in brackets, may hold anything
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(pid)
    found = children.pop(ancestor, [])
    for pid in found:
        found += children.pop(pid, [])
    return found


def arguments_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
