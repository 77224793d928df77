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
    """Raised if there is no process: it costs nothing to try again."""


class ServerProcess:
    """Runs tritonserver once, below a keeper, and logs its output."""

    def __init__(
        self,
        keeper: asyncio.subprocess.Process,
        server: int,  # the pid of tritonserver, kept once it has ended
        lifeline: ExitStack,  # once it is closed the keeper ends everything
        report: "_Report",
        output: Output,
    ) -> None:
        self.started_at = clock.monotonic()
        self.server = server
        self._keeper = keeper
        self._lifeline = lifeline
        self._report = report
        self._output = output

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        memory_prefix: str,
    ) -> Self:
        """Start the server. Raises NotStarted, and leaves nothing open.

        `memory_prefix` begins the names of its shared memory regions. A session of its own keeps a
        terminal's Ctrl-C away: the adapter drains first.
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
            server = await report.pid
            if server is None:
                await _wait_for_rest(process, output)
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
        """Return the pid of the keeper, the ancestor of all that Triton and its models start."""
        return self._keeper.pid

    async def wait(self) -> str:
        """Wait until the server and all that it started have ended; return how the server did."""
        code = await asyncio.shield(self._report.code)
        self._lifeline.close()
        # if somebody killed the keeper, the kernel kills the server, and nobody the rest
        if code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.server, signal.SIGKILL)
        await _wait_for_rest(self._keeper, self._output)
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
        """End the server: SIGTERM, and SIGKILL after so many seconds; SIGKILL at once for 0.

        A process that survives SIGKILL is held by the kernel, and is left behind.
        """
        if seconds:
            with suppress(ProcessLookupError):
                self._keeper.terminate()  # the keeper passes SIGTERM on
            with suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), seconds)
                return
        self.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), _KILL_SECONDS)

    def kill(self) -> None:
        """Kill the server at once, with all that it started."""
        self._lifeline.close()

    def complaint(self) -> str:
        """Return the last lines that it printed, the very last one first."""
        return self._output.complaint()


async def _wait_for_rest(keeper: asyncio.subprocess.Process, output: Output) -> None:
    """Wait until the keeper has ended and all output is read.

    A process that survives SIGKILL keeps its keeper and the pipe of its output: the wait is
    limited.
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
    """Start a keeper; return its output, its report, which `undo` closes, and its process.

    Raises OSError and RuntimeError without a descriptor, process or thread.
    """
    with ExitStack() as child_ends:  # the keeper has inherited these once it is started
        # not asyncio's own pipes: with those, wait() waits for the stubs too, which inherit them
        output_end, child_output = os.pipe()
        child_ends.callback(os.close, child_output)
        output = Output(output_end)  # ends with the last process that holds `child_output`
        report_end, child_report = os.pipe()
        child_ends.callback(os.close, child_report)
        report = _Report(report_end)
        undo.callback(report.close)
        child_lifeline, lifeline_end = os.pipe()
        child_ends.callback(os.close, child_lifeline)
        lifeline.callback(os.close, lifeline_end)
        command = [*_KEEPER, str(child_report), *arguments]
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=child_lifeline,
            stdout=child_output,
            stderr=child_output,
            pass_fds=[child_report],
            start_new_session=True,
        )
    return output, report, process


class _Report:
    """Reads the keeper's report: tritonserver's pid, and its exit code once it has ended.

    Each is None if the keeper ended without it.
    """

    def __init__(self, pipe: int) -> None:
        """Take over the descriptor."""
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._partial_line = b""
        self.pid: asyncio.Future[int | None] = self._loop.create_future()
        self.code: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(pipe, self._read)

    def _read(self) -> None:
        """Read what the keeper has written; called by the event loop."""
        chunk = os.read(self._pipe, 64)
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        for line in lines:
            future = self.code if self.pid.done() else self.pid
            future.set_result(int(line))
        if not chunk:
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
