"""Forks adapters off one process that has imported what `serve` imports: in a new interpreter that
takes each of them a second of CPU. A forked adapter has the arguments, variables, folder and
descriptors of a new one, and runs the same `main`. So has each other command (`run`).

`tests.running` starts this process, `python -m tests.forked`; each process of tests has one.
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from tests.constants import set_constants

_REQUEST_BYTES = 1 << 19
# what `serve` imports in any case
_IMPORTED = ("adapter.__main__", "adapter.cli.serve", "adapter.app", "uvloop")


def run(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    stdin: bytes = b"",
    folder: Path | None = None,
    seconds: float = 100,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, on files."""
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        child = Child(arguments, environ, [each.fileno() for each in (given, out, err)], folder)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


class Child:
    """A child of the process that forks; it has what the tests use of subprocess.Popen. On a
    terminal it leads a session of its own, whose terminal is the first of the descriptors.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        descriptors: Sequence[int],
        folder: Path | None = None,
        *,
        is_on_terminal: bool = False,
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._status, status = os.pipe()
        try:
            request = {
                "arguments": arguments,
                "environ": dict(environ),
                "folder": str(folder or Path.cwd()),
                "is_on_terminal": is_on_terminal,
            }
            self.pid = _server().start(request, (*descriptors, status))
        finally:
            os.close(status)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._lock:
                if self.returncode is None:
                    self.returncode = int(os.read(self._status, 16))
                    os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(Child):
    """One whose output is read from pipes."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        (said, out), (complained, err) = os.pipe(), os.pipe()
        self.stdout: IO[Any] = os.fdopen(said)
        self.stderr: IO[Any] = os.fdopen(complained)
        try:
            with open(os.devnull) as nothing:  # noqa: PTH123
                super().__init__(arguments, environ, (nothing.fileno(), out, err))
        finally:
            os.close(out)
            os.close(err)


class _Server:
    """The process that forks, as the tests see it. It ends with its socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    "GRPC_ENABLE_FORK_SUPPORT": "0",  # as `serve` sets it before it imports gRPC
                    "OPENBLAS_NUM_THREADS": "1",  # a process with threads is not to be forked
                },
            )
        atexit.register(self._end)

    def start(self, request: Mapping[str, object], descriptors: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return int(self._socket.recv(16))

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


_server = cache(_Server)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Return the request in the child, None in the parent at its end, when
    it has asked the children that are left to end as well.
    """
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        if woken in select.select([control, woken], [], [])[0]:
            os.read(woken, 512)
            _reap(statuses)
            continue
        data, received, *_ = socket.recv_fds(control, _REQUEST_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        if not data:  # the tests are over, or their process has crashed
            for pid in statuses:
                os.kill(pid, signal.SIGTERM)
            return None
        *standard, status = received
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            control.detach()
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            return json.loads(data)
        statuses[pid] = status
        for descriptor in standard:
            os.close(descriptor)
        control.send(str(pid).encode())


def _reap(statuses: dict[int, int]) -> None:
    while statuses:
        pid, code = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        status = statuses.pop(pid)
        os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
        os.close(status)


def main() -> int:
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that a child does not copy what it only looks through
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return 0
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - those of this process
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - those of this process
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if request["is_on_terminal"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever was inherited
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    if path := os.environ.get("PYTHONPATH"):
        sys.path[:0] = path.split(os.pathsep)
    set_constants()
    sys.argv[1:] = request["arguments"]
    return importlib.import_module("adapter.__main__").main()


if __name__ == "__main__":
    sys.exit(main())
