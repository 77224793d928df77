"""Unpacks an archive in a process of its own."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import adapter
from adapter.errors import AdapterError, BackendError, BackendUnavailable, InvalidModel
from adapter.packages.messages import shown
from adapter.packages.roots import Opened
from adapter.packages.unpack import Limits

# -S: without site-packages, whose .pth files may import anything.
_START = (
    "import sys; sys.path += sys.argv.pop(1).split(':');"
    "from adapter.packages.archive import main; main()"
)
_CONTENT = "/proc/self/fd/0"


def _list_import_folders() -> str:
    """Return where the adapter is, and isal, which an editable adapter has elsewhere."""
    folders = [str(Path(adapter.__path__[0]).parent)]
    spec = find_spec("isal")
    if spec is not None and spec.origin is not None:
        folders.append(str(Path(spec.origin).parent.parent))
    return ":".join(dict.fromkeys(folders))


# Reserves bytes on disk before they are written, and checks that so many files can be made. Raises
# an error where there is no room.
Reserve = Callable[[int, int], None]
_COMMAND = (sys.executable, "-I", "-S", "-c", _START, _list_import_folders())
_ERRORS = {error.__name__: error for error in (InvalidModel, BackendError)}


@dataclass(slots=True)
class Pipe:
    """The end of a pipe from which an archive is read."""

    descriptor: int
    packed_bytes: int  # of the whole archive
    is_closed: bool = False

    def close(self) -> None:
        """Close our copy of the end, so that the writer fails once the process has ended."""
        if not self.is_closed:
            self.is_closed = True
            os.close(self.descriptor)


class UnpackingProcess:
    """Unpacks one archive, once. `run` is called in a thread, `kill` in any."""

    def __init__(self) -> None:
        """Prepare to unpack one archive; no process is started yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._lock = threading.Lock()

    def run(
        self,
        archive: Path,
        target: Path,
        limits: Limits,
        content: Opened | Pipe,
        reserve: Reserve | None = None,
    ) -> None:
        """Unpack as `archives.unpack` does, with its errors; `content` is the opened archive, or
        where it comes from. `reserve` is called in this thread.

        Raises BackendUnavailable if no process can be started, BackendError also if it was killed.
        """
        failed = f"cannot unpack {shown(archive)}"
        job: dict[str, object] = {
            "archive": str(archive),
            "target": str(target),
            "content": None if isinstance(content, Pipe) else _CONTENT,
            "packed_bytes": content.packed_bytes if isinstance(content, Pipe) else None,
            "limits": asdict(limits),
            "is_reserved": reserve is not None,
        }
        text = json.dumps(job)
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    process = self._started(text, content.descriptor, theirs.fileno())
                if isinstance(content, Pipe):
                    content.close()
            except OSError as error:
                raise BackendUnavailable(
                    f"{failed}: no process can be started: {error.strerror}", delivered=False
                ) from error
            try:
                reply = _conversation(ours, reserve)
            except BaseException:
                process.kill()
                process.communicate()
                shutil.rmtree(target, ignore_errors=True)
                raise
        complaint = process.communicate()[1]
        if process.returncode != 0:
            # what a killed process has left is removed with all that there is of the load
            if not self._is_killed:
                shutil.rmtree(target, ignore_errors=True)
            raise BackendError(f"{failed}: {_ended(process.returncode, complaint)}")
        if reply:
            raise _error(reply)

    def kill(self) -> None:
        """End the process, so that `run` raises BackendError soon."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()

    def _started(self, job: str, descriptor: int, out: int) -> subprocess.Popen[bytes]:
        """Start the process with its job. Raise InterruptedError if `kill` was called before."""
        with self._lock:
            if self._is_killed:
                raise InterruptedError(0, "the load was given up")
            self._process = subprocess.Popen(
                [*_COMMAND, str(os.getpid()), job],
                stdin=descriptor,
                stdout=out,
                stderr=subprocess.PIPE,
                # No descriptor here is inheritable. To close 5000 all the same kept the interpreter
                # lock for 5 ms; `pass_fds` would do so.
                close_fds=False,
                # A terminal's Ctrl-C is for the adapter, which drains. No session of its own: Linux
                # shares the CPU out among sessions first (autogroups, sched(7)), so each switch to
                # one at the other end of the pipe would wait for all other sessions.
                process_group=0,
            )
            return self._process


def _conversation(process: socket.socket, reserve: Reserve | None) -> bytes:
    """Reserve room as the process requests it. Return the error that it sent, as JSON; empty if
    there was none.
    """
    with process.makefile("rb") as lines:
        for line in lines:
            asked = json.loads(line)
            if "error" in asked or reserve is None:
                return line
            reserve(asked["room"], asked["inodes"])
            with suppress(BrokenPipeError):  # the process was killed
                process.sendall(b"+")
    return b""


def _error(line: bytes) -> AdapterError:
    """Return the error that the process sent."""
    error = json.loads(line)
    return _ERRORS[error["error"]](error["text"])


def _ended(code: int, complaint: bytes) -> str:
    """Return how the process ended: the signal that killed it, or its exit code and last line."""
    if code < 0:
        return f"the process for it was killed by {signal.Signals(-code).name}"
    last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
    return f"the process for it ended with {code}: {last}"
