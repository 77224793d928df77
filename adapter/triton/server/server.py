"""Starts the embedded tritonserver, watches it, restarts it when it dies, and ends it.

Nothing outlives the adapter, even when it is killed: see keeper.py.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from adapter.errors import BackendUnavailable
from adapter.runtime import background, clock
from adapter.runtime.threads import PROCESSES, REPOSITORY
from adapter.triton.liveness import answers, is_live
from adapter.triton.server import cleanup
from adapter.triton.server.launch import (
    RunFolder,
    allocator_variables,
    prepare,
    select_known,
    take_port,
)
from adapter.triton.server.process import NotStarted, ServerProcess
from adapter.triton.server.processes import ModelProcesses, TritonProcesses

_log = logging.getLogger("adapter.triton")

_EXIT_TIMEOUT_SECONDS = 8  # Triton's own, for requests in flight
_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 1.0
_POLL_SECONDS = 0.05
_DEFAULT_BACKENDS = "/opt/tritonserver/backends"  # as in NVIDIA's images
_LOAD_THREADS = "--model-load-thread-count="
_DEFAULT_LOAD_THREADS = 4  # Triton's own
_BACKENDS = "--backend-directory="
_TRACKER = "triton-backend-memory-tracker"
# The pause before a restart begins with the first, and is doubled up to the last.
_FIRST_DELAY_SECONDS = 0.5
_LAST_DELAY_SECONDS = 30.0
_STEADY_SECONDS = 60.0  # after which an exit is no sign of a server that cannot live
_RETRY_SECONDS = 1.0


class EmbeddedTriton:
    """Supervises one tritonserver: `start` it once, then `stop` it."""

    def __init__(
        self,
        *,
        tritonserver: Path | None,
        repository: Path | None,
        # host and port; port 0 is any free one, kept over restarts
        http: tuple[str, int],
        grpc: tuple[str, int],
        metrics: tuple[str, int],
        extra_args: Sequence[str],
        start_timeout_seconds: float,
        on_exit: Callable[[str], None] = lambda _: None,  # why a server has ended
        withheld: Collection[str] = (),  # variables that neither Triton nor its models may read
        newer_args: Mapping[str, str] | None = None,  # options that only newer servers know
        has_gpus: Callable[[], Awaitable[bool]] | None = None,  # None: nothing is made of them
    ) -> None:
        self._binary = tritonserver
        self._wanted = {"http": http, "grpc": grpc, "metrics": metrics}
        self._extra_args = tuple(extra_args)
        self._start_timeout_seconds = start_timeout_seconds
        self._on_exit = on_exit
        self._withheld = withheld
        self._newer_args = newer_args or {}
        self._has_gpus = has_gpus
        self._folder = RunFolder()
        self.repository = (repository or self._folder.path / "repository").absolute()
        self.http_address = self.grpc_address = self.metrics_address = ""
        self.restarts = 0  # servers that have replaced a dead one
        self.processes = TritonProcesses(
            lambda: self._running,
            self.repository,
            region_prefix=self._folder.path.name,
        )
        self._ports = ExitStack()
        self._command: tuple[str, ...] = ()
        self._environment: Mapping[str, str] = {}
        self._server: ServerProcess | None = None
        self._launched: ServerProcess | None = None
        self._exit_reason = ""  # of the latest server that has ended
        self._model_processes: ModelProcesses | None = None
        self._delay = _FIRST_DELAY_SECONDS  # before the next server
        self._supervisor: asyncio.Task[NoReturn] | None = None

    @property
    def pid(self) -> int | None:
        """Return the pid of tritonserver; None while there is none."""
        return self._server.pid if self._server else None

    @property
    def up(self) -> ServerProcess | None:
        """Return the run of the server, once it was seen live and until it ends."""
        is_up = self.pid is not None and self._launched is self._server
        return self._launched if is_up else None

    @property
    def _running(self) -> ModelProcesses | None:
        """Return what lists the processes; None while the server is down."""
        return self._model_processes if self.pid is not None else None

    @property
    def exit_reason(self) -> str:
        """Return how the latest server that has ended did so; "" if none has."""
        reason = "" if self._server is None else self._server.exit_reason
        return reason or self._exit_reason

    @property
    def load_threads(self) -> int:
        """Return how many loads Triton works on at a time."""
        count = _find_last(self._extra_args, _LOAD_THREADS)
        return int(count) if count and count.isdecimal() else _DEFAULT_LOAD_THREADS

    async def start(self) -> None:
        """Start the server, and wait until it is live. Raises BackendUnavailable with a reason."""
        try:
            await REPOSITORY.run(RunFolder.sweep)
            await self._prepare()
            await self._launch()
        except BaseException:
            await self.stop()
            raise
        self._supervisor = background.begin(
            "triton-supervisor", background.forever(self._supervise, seconds=_RETRY_SECONDS)
        )

    async def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """End the server: within `seconds` in good order, at once if it does not even answer.

        Nothing of it is left, except what the kernel holds.
        """
        if self._supervisor is not None:
            background.end(self._supervisor)
            await asyncio.wait([self._supervisor])
        if self._server is not None:
            is_ready = self.up is not None and await answers(self, _ANSWER_SECONDS)
            await self._server.stop(seconds if is_ready else 0)
        self._ports.close()
        await REPOSITORY.run(self._folder.remove)

    async def restart(self, reason: str) -> None:
        """Kill the server, which cannot end in good order; the supervisor soon starts another."""
        _log.error("triton.ended", extra={"reason": reason})
        self._delay = _FIRST_DELAY_SECONDS
        if self._server is not None:
            self._server.kill()

    def backends(self) -> frozenset[str] | None:
        """Return the names of the server's backends; None if their folder cannot be read."""
        folder = Path(_find_last(self._command, _BACKENDS) or _DEFAULT_BACKENDS)
        try:
            return frozenset(path.name for path in folder.iterdir() if path.is_dir())
        except OSError:
            return None

    def pids(self) -> Collection[int]:
        """Return the pids of tritonserver and all that it started; none while it is down.

        Raises OSError if they cannot be listed.
        """
        running = self._running
        return () if running is None else running.owners().keys()

    async def _prepare(self) -> None:
        """Find the binary, take the ports, and compose command and environment for all runs.

        Raises BackendUnavailable.
        """
        launch = prepare(self._binary, self._folder.path)
        self.repository.mkdir(mode=0o755, parents=True, exist_ok=True)
        arguments = []
        for name, (host, port) in self._wanted.items():
            number = take_port(self._ports, name, host, port)
            arguments += [f"--{name}-address={host}", f"--{name}-port={number}"]
            setattr(self, f"{name}_address", f"{host}:{number}")
        own = {name: text for name, text in os.environ.items() if name not in self._withheld}
        self._environment = {**own, **allocator_variables(own), **launch.environment}
        self._command = (
            str(launch.binary),
            f"--model-repository={self.repository}",
            "--model-control-mode=explicit",
            "--strict-readiness=false",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_SECONDS}",
            f"--backend-config=python,shm-region-prefix-name={self._folder.path.name}",
            *arguments,
            *launch.arguments,
            *(await self._select_newer(launch.binary)),
            *(await self._choose_tracker()),
            *self._extra_args,
        )

    async def _select_newer(self, binary: Path) -> tuple[str, ...]:
        """Return the options of `newer_args` that this server knows."""
        if not self._newer_args:
            return ()
        return await PROCESSES.run(select_known, binary, self._environment, self._newer_args)

    async def _choose_tracker(self) -> tuple[str, ...]:
        """Return the option for Triton's memory tracker, where there is a GPU and the operator's
        arguments do not name it.

        A server that was built without a tracker does not mind (2.51).
        """
        is_named = any(_TRACKER in argument for argument in self._extra_args)
        if self._has_gpus is None or is_named or not await self._has_gpus():
            return ()
        return (f"--backend-config={_TRACKER}=true",)

    def _note_environment(self, place: Path) -> None:
        """Have a folder of environments removed once Triton has ended."""
        try:
            cleanup.note_environment(self._folder.notes, place)
        except OSError as error:
            _log.warning("triton.environment_left", extra={"reason": str(error)})

    async def _launch(self) -> None:
        """Start one run of the server, and wait until it is live. Raises BackendUnavailable."""
        self._server = server = await ServerProcess.spawn(
            self._command, self._environment, self._folder.path.name
        )
        self._model_processes = ModelProcesses(
            server.keeper, server.server, self.repository, self._note_environment
        )
        try:
            async with asyncio.timeout(self._start_timeout_seconds) as limit:
                while not (answer := await is_live(self.http_address)):
                    if answer is None:  # the adapter lacks descriptors: no fault of the server
                        now = asyncio.get_running_loop().time()
                        limit.reschedule(now + self._start_timeout_seconds)
                    if server.pid is None:
                        raise BackendUnavailable(
                            f"tritonserver {await server.wait()}: {server.complaint()}",
                            delivered=False,
                        )
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            raise BackendUnavailable(
                f"tritonserver is not live after {self._start_timeout_seconds:g} s:"
                f" {server.complaint()}",
                delivered=False,
            ) from error
        self._launched = server

    async def _supervise(self) -> None:
        """Wait for the end of the server, and start the next one. Called again and again."""
        server = self._server
        assert server is not None  # noqa: S101 - start() comes first
        reason = await server.wait()
        self._exit_reason = reason
        await REPOSITORY.run(cleanup.remove_environments, self._folder.notes)
        _log.warning("triton.exited", extra={"reason": reason})
        self._on_exit(reason)
        if clock.monotonic() - server.started_at > _STEADY_SECONDS:
            self._delay = _FIRST_DELAY_SECONDS
        is_replaced = False
        while not is_replaced:
            await asyncio.sleep(self._delay)
            is_replaced = await self._replace()

    async def _replace(self) -> bool:
        """Start the next server; return whether it is live. Sets the pause before another."""
        try:
            await self._launch()
        except NotStarted as error:  # an attempt without a process costs nothing
            self._delay = _RETRY_SECONDS
            _log.warning("triton.restart_failed", extra={"reason": str(error)})
            return False
        except Exception as error:  # noqa: BLE001 - whatever it raises, supervision goes on
            self._delay = min(self._delay * 2, _LAST_DELAY_SECONDS)
            _log.warning("triton.restart_failed", extra={"reason": str(error)})
            if self._server is not None:
                await self._server.stop(0)
            return False
        self._delay = min(self._delay * 2, _LAST_DELAY_SECONDS)  # if this server does not last
        self.restarts += 1
        _log.warning("triton.restarted", extra={"restarts": self.restarts})
        return True


def _find_last(arguments: Sequence[str], option: str) -> str | None:
    """Return the value of an option that counts: the last one; None without any."""
    values = [each.removeprefix(option) for each in arguments if each.startswith(option)]
    return values[-1] if values else None
