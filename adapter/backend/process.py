"""One run of the tritonserver process: its start, its log, its end, and the processes below it."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Self

from adapter.backend.output import Output
from adapter.errors import BackendUnavailable

_KILL_SECONDS = 2.0
_LOG_END_SECONDS = 1.0
_ORPHANS_SECONDS, _POLL_SECONDS = 1.0, 0.02

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


class NotStarted(BackendUnavailable):
    """There is no process: it costs nothing to try again."""


class ServerProcess:
    """One run of the process, its output, and its process group."""

    def __init__(
        self, process: asyncio.subprocess.Process, lifeline: ExitStack, output: Output
    ) -> None:
        self.started_at = time.monotonic()
        self._process = process
        self._lifeline = lifeline
        self._output = output

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        memory_prefix: str,
        on_dropped: Callable[[int], None],
    ) -> Self:
        """Start it, or raise BackendUnavailable and leave nothing open.

        `memory_prefix` begins the names of its shared memory regions; `on_dropped` is told of lines
        of its output that are not logged. A session of its own keeps a terminal's Ctrl-C away: we
        drain first.
        """
        with ExitStack() as lent, ExitStack() as lifeline:
            try:
                # not asyncio's own pipes: with those, wait() waits for the stubs too, which
                # inherit them
                said, theirs = os.pipe()
                lent.callback(os.close, theirs)
                output = Output(said, on_dropped)  # ends with the last who holds `theirs`
                guarded, held = os.pipe()
                lent.callback(os.close, guarded)
                lifeline.callback(os.close, held)
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", "-c", _LAUNCHER, memory_prefix, *command),
                    env=environment,
                    stdin=guarded,
                    stdout=theirs,
                    stderr=theirs,
                    start_new_session=True,
                )
            except (OSError, RuntimeError) as error:  # no descriptor, process or thread to be had
                raise NotStarted(
                    f"tritonserver cannot be started: {error}", delivered=False
                ) from error
            return cls(process, lifeline.pop_all(), output)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process.returncode is None else None

    async def ended(self) -> str:
        """Wait for the end, let the guard take the rest along, and say how it ended."""
        code = await self._process.wait()
        self._lifeline.close()
        # The guard holds the pipe until it is done. So may, for ever, what a model has moved to
        # another session.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOG_END_SECONDS):
                while not self._output.is_over:  # noqa: ASYNC110 - a thread
                    await asyncio.sleep(_POLL_SECONDS)
        self._output.close()
        await _reap_orphans()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    async def stop(self, seconds: float) -> None:
        """SIGTERM, and after so many seconds SIGKILL; that alone where there are none. What even
        this does not end is left: the kernel holds it.
        """
        ways = ((signal.SIGTERM, seconds), (signal.SIGKILL, _KILL_SECONDS))
        for number, patience in ways if seconds else ways[1:]:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended(), patience)
                return

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def complaint(self) -> str:
        """Its last words."""
        return self._output.complaint()


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
                        await asyncio.sleep(_POLL_SECONDS)
