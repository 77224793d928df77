"""Runs the tritonserver process once, below its keeper: its start, its log and its end."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Self

from adapter.errors import BackendUnavailable
from adapter.runtime import clock
from adapter.triton.server import keeper
from adapter.triton.server.output import Output

_KILL_SECONDS = 2.0
_REST_SECONDS = 1.0  # until what Triton leaves behind is gone
_POLL_SECONDS = 0.02

# Between fork and exec nothing may run here, because of threads; the keeper has none.
_KEEPER = (sys.executable, "-I", "-S", keeper.__file__)


class NotStarted(BackendUnavailable):
    """There is no process: it costs nothing to try again."""


class ServerProcess:
    """One run of the process, below its keeper, and its output."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        server: int,
        lifeline: ExitStack,
        report: "_Report",
        output: Output,
    ) -> None:
        self.started_at = clock.monotonic()
        self._keeper = process
        self.server = server  # its pid, also once it has ended
        self._lifeline = lifeline  # once it is closed the keeper ends everything
        self._report = report
        self._output = output

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        memory_prefix: str,
    ) -> Self:
        """Start it, or raise BackendUnavailable and leave nothing open.

        `memory_prefix` begins the names of its shared memory regions. A session of its own keeps a
        terminal's Ctrl-C away: we drain first.
        """
        with ExitStack() as undo, ExitStack() as lifeline:
            try:
                output, report, process = await _start(
                    undo, lifeline, [memory_prefix, *command], environment
                )
            except (OSError, RuntimeError) as error:  # no descriptor, process or thread
                raise NotStarted(
                    f"tritonserver cannot be started: {error}", delivered=False
                ) from error
            if (server := await report.pid) is None:
                await _heard_out(process, output)
                raise NotStarted(
                    f"tritonserver cannot be started: {output.complaint()}", delivered=False
                )
            undo.pop_all()
            return cls(process, server, lifeline.pop_all(), report, output)

    @property
    def pid(self) -> int | None:
        """Return the pid of tritonserver; None once it has ended."""
        return None if self._report.code.done() else self.server

    @property
    def keeper(self) -> int:
        """Return the pid of its parent, the ancestor of all that it and its models start."""
        return self._keeper.pid

    async def ended(self) -> str:
        """Wait for the end, let the keeper end the rest, and say how it ended."""
        code = await asyncio.shield(self._report.code)
        self._lifeline.close()
        if code is None:  # somebody killed the keeper, so the kernel kills the server; not the rest
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.server, signal.SIGKILL)
        await _heard_out(self._keeper, self._output)
        self._output.close()
        self._report.close()
        return self.exit_reason

    @property
    def exit_reason(self) -> str:
        """Return how the server has ended; "" while it runs."""
        if not self._report.code.done():
            return ""
        code = self._report.code.result()
        if code is None:
            return "lost its keeper, and was killed"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    async def stop(self, seconds: float) -> None:
        """Send SIGTERM, and SIGKILL after so many seconds; SIGKILL alone without any. What survives
        that is left: the kernel holds it.
        """
        if seconds:
            with suppress(ProcessLookupError):
                self._keeper.terminate()  # it passes it on
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended(), seconds)
                return
        self.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended(), _KILL_SECONDS)

    def kill(self) -> None:
        """Kill it at once, with all below it."""
        self._lifeline.close()

    def complaint(self) -> str:
        """Return its last words."""
        return self._output.complaint()


async def _heard_out(keeper: asyncio.subprocess.Process, output: Output) -> None:
    """Wait until both have ended. A process that survives SIGKILL keeps its keeper and the pipe of
    its output: the wait is limited.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_REST_SECONDS):
            await keeper.wait()
            while not output.is_over:  # noqa: ASYNC110 - a thread
                await asyncio.sleep(_POLL_SECONDS)


async def _start(
    undo: ExitStack,
    lifeline: ExitStack,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> tuple[Output, "_Report", asyncio.subprocess.Process]:
    """Start a keeper; return its output, its report, which `undo` closes, and its process."""
    with ExitStack() as lent:
        # not asyncio's own pipes: with those, wait() waits for the stubs too, which inherit them
        said, theirs = os.pipe()
        lent.callback(os.close, theirs)
        output = Output(said)  # ends with the last who holds `theirs`
        report_end, keeper_end = os.pipe()
        lent.callback(os.close, keeper_end)
        report = _Report(report_end)
        undo.callback(report.close)
        guarded, held = os.pipe()
        lent.callback(os.close, guarded)
        lifeline.callback(os.close, held)
        process = await asyncio.create_subprocess_exec(
            *(*_KEEPER, str(keeper_end), *arguments),
            env=environment,
            stdin=guarded,
            stdout=theirs,
            stderr=theirs,
            pass_fds=[keeper_end],
            start_new_session=True,
        )
    return output, report, process


class _Report:
    """The keeper's report: tritonserver's pid, and its exit code once it has ended; each None if
    the keeper ended without it.
    """

    def __init__(self, pipe: int) -> None:
        """Take over the descriptor."""
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._heard = b""
        self.pid: asyncio.Future[int | None] = self._loop.create_future()
        self.code: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(pipe, self._hear)

    def _hear(self) -> None:
        said = os.read(self._pipe, 64)
        *lines, self._heard = (self._heard + said).split(b"\n")
        for line in lines:
            (self.code if self.pid.done() else self.pid).set_result(int(line))
        if not said:
            self.close()

    def close(self) -> None:
        """Close the pipe. A second call does nothing."""
        if self._pipe >= 0:
            self._loop.remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1
            for future in (self.pid, self.code):
                if not future.done():
                    future.set_result(None)
