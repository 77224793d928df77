"""Starts a tritonserver of our own, watches it, restarts it when it dies, and never leaves it
behind.

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
from adapter.triton.server.launch import (
    RunFolder,
    accepted,
    allocator_variables,
    prepare,
    take_port,
)
from adapter.triton.server.model_processes import TritonProcesses
from adapter.triton.server.process import NotStarted, ServerProcess
from adapter.triton.server.processes import ModelProcesses

_log = logging.getLogger("adapter.triton")

_EXIT_TIMEOUT_SECONDS = 8  # Triton's own, for requests in flight
_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 1.0
_POLL_SECONDS = 0.05
_DEFAULT_BACKENDS = "/opt/tritonserver/backends"  # as in NVIDIA's images
_LOAD_THREADS, _DEFAULT_LOAD_THREADS = "--model-load-thread-count=", 4
_TRACKER = "triton-backend-memory-tracker"
_BACKOFF_SECONDS = (0.5, 30.0)
_STEADY_SECONDS = 60.0
_RETRY_SECONDS = 1.0


class EmbeddedTriton:
    """A supervised tritonserver: start() once, then stop()."""

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
        self._exit_reason = ""  # of the latest one that has ended
        self._model_processes: ModelProcesses | None = None
        self._delay = _BACKOFF_SECONDS[0]  # before the next server
        self._supervisor: asyncio.Task[NoReturn] | None = None

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server else None

    @property
    def up(self) -> ServerProcess | None:
        """Return the server, once it was seen live and while it runs."""
        return self._launched if self.pid is not None and self._launched is self._server else None

    @property
    def _running(self) -> ModelProcesses | None:
        """Return the processes, while the server runs."""
        return self._model_processes if self.pid is not None else None

    @property
    def exit_reason(self) -> str:
        """Return how the latest server that has ended did so; "" if none has."""
        present = "" if self._server is None else self._server.exit_reason
        return present or self._exit_reason

    @property
    def load_threads(self) -> int:
        """Return how many loads it works on at a time."""
        given = [a.partition("=")[2] for a in self._extra_args if a.startswith(_LOAD_THREADS)]
        return int(given[-1]) if given and given[-1].isdecimal() else _DEFAULT_LOAD_THREADS

    async def start(self) -> None:
        """Return when the server is live. Raises BackendUnavailable with the reason if not."""
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
        """End the server: within `seconds` in good order, at once if it does not even answer."""
        if self._supervisor is not None:
            background.end(self._supervisor)
            await asyncio.wait([self._supervisor])
        if self._server is not None:
            is_ready = self.up is not None and await answers(self, _ANSWER_SECONDS)
            await self._server.stop(seconds if is_ready else 0)
        self._ports.close()
        await REPOSITORY.run(self._folder.remove)

    async def restart(self, reason: str) -> None:
        """End the server at once, as it cannot end in good order; the supervisor starts another, as
        after a server that has lived for long.
        """
        _log.error("triton.ended", extra={"reason": reason})
        self._delay = _BACKOFF_SECONDS[0]
        if self._server is not None:
            self._server.kill()

    def backends(self) -> frozenset[str] | None:
        """Return the names of the server's backends; None if their folder cannot be read."""
        option = "--backend-directory="
        given = [arg.removeprefix(option) for arg in self._command if arg.startswith(option)]
        folder = Path(given[-1] if given else _DEFAULT_BACKENDS)
        try:
            return frozenset(path.name for path in folder.iterdir() if path.is_dir())
        except OSError:
            return None

    def owners(self) -> Mapping[int, str | None]:
        """Return all processes, each with the name in Triton of its only model; none while the
        server is down. Raises OSError if they cannot be listed.
        """
        return {} if (running := self._running) is None else running.owners()

    async def _prepare(self) -> None:
        launch = prepare(self._binary, self._folder.path)
        self.repository.mkdir(mode=0o755, parents=True, exist_ok=True)
        arguments = []
        for name, (host, port) in self._wanted.items():
            taken = take_port(self._ports, name, host, port)
            arguments += [f"--{name}-address={host}", f"--{name}-port={taken}"]
            setattr(self, f"{name}_address", f"{host}:{taken}")
        kept = {name: text for name, text in os.environ.items() if name not in self._withheld}
        self._environment = {**kept, **allocator_variables(kept), **launch.environment}
        newer = (launch.binary, self._environment, self._newer_args)
        self._command = (
            str(launch.binary),
            f"--model-repository={self.repository}",
            "--model-control-mode=explicit",
            "--strict-readiness=false",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_SECONDS}",
            f"--backend-config=python,shm-region-prefix-name={self._folder.path.name}",
            *arguments,
            *launch.arguments,
            *(await PROCESSES.run(accepted, *newer) if self._newer_args else ()),
            *(await self._tracker()),
            *self._extra_args,
        )

    async def _tracker(self) -> tuple[str, ...]:
        """Return the option for Triton's memory tracker, on a GPU and unless somebody said it. One
        that was built without a tracker does not mind (2.51).
        """
        is_said = any(_TRACKER in given for given in self._extra_args)
        if self._has_gpus is None or is_said or not await self._has_gpus():
            return ()
        return (f"--backend-config={_TRACKER}=true",)

    def _note_environment(self, place: Path) -> None:
        try:
            self._folder.note_environment(place)
        except OSError as error:
            _log.warning("triton.environment_left", extra={"reason": str(error)})

    async def _launch(self) -> ServerProcess:
        self._server = server = await ServerProcess.spawn(
            self._command, self._environment, self._folder.path.name
        )
        self._model_processes = ModelProcesses(
            server.keeper, server.server, self.repository, self._note_environment
        )
        try:
            async with asyncio.timeout(self._start_timeout_seconds) as limit:
                while not (answer := await is_live(self.http_address)):
                    if answer is None:  # no fault of the server's
                        now = asyncio.get_running_loop().time()
                        limit.reschedule(now + self._start_timeout_seconds)
                    if server.pid is None:
                        raise BackendUnavailable(
                            f"tritonserver {await server.ended()}: {server.complaint()}",
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
        return server

    async def _supervise(self) -> None:
        """From a server that runs to the next one. Called again and again."""
        server = self._server
        assert server is not None  # noqa: S101 - start() comes first
        reason = await server.ended()
        self._exit_reason = reason
        await REPOSITORY.run(self._folder.remove_environments)
        _log.warning("triton.exited", extra={"reason": reason})
        self._on_exit(reason)
        if clock.monotonic() - server.started_at > _STEADY_SECONDS:
            self._delay = _BACKOFF_SECONDS[0]
        is_replaced = False
        while not is_replaced:
            await asyncio.sleep(self._delay)
            is_replaced = await self._replace()

    async def _replace(self) -> bool:
        try:
            await self._launch()
        except NotStarted as error:  # that cost nothing
            self._delay = _RETRY_SECONDS
            _log.warning("triton.restart_failed", extra={"reason": str(error)})
            return False
        except Exception as error:  # noqa: BLE001 - whatever it raises, supervision goes on
            self._delay = min(self._delay * 2, _BACKOFF_SECONDS[1])
            _log.warning("triton.restart_failed", extra={"reason": str(error)})
            if self._server is not None:
                await self._server.stop(0)
            return False
        self._delay = min(self._delay * 2, _BACKOFF_SECONDS[1])  # if it does not last
        self.restarts += 1
        _log.warning("triton.restarted", extra={"restarts": self.restarts})
        return True
