"""Runs as the parent process of tritonserver: kills all that Triton or a model has started when
Triton or the adapter ends, in whatever way.

Run by its path, `python -I -S keeper.py REPORT PREFIX TRITONSERVER ARGUMENTS...`. It imports
nothing of the adapter, and little of Python, as imports cost start time and memory. It is the
subreaper of its descendants: each orphan becomes its child, also a daemon that a model started.

REPORT is a pipe to which it writes tritonserver's pid and later its exit code (negative for a
signal), a line each. Its stdin is a pipe that only the adapter holds: when that is closed, by the
adapter or by its death, Triton is killed at once. SIGTERM is passed on to Triton. Once Triton has
ended, all other descendants are killed before this process exits. PREFIX begins the names of
Triton's shared memory regions, which are removed then.
"""

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NOT_EXECUTED = 127
_REGIONS = "/dev/shm"  # noqa: S108 - where Triton puts them
_PARENT = 1  # of the fields behind the name in /proc/PID/stat


def main() -> None:
    """Start tritonserver, wait for its end, and kill all processes that it leaves behind."""
    report = int(sys.argv[1])
    prefix, *command = sys.argv[2:]
    os.closerange(3, report)  # inherited copies of descriptors that nothing uses
    os.closerange(report + 1, os.sysconf("SC_OPEN_MAX"))
    os.set_inheritable(report, False)  # noqa: FBT003 - the argument takes no name
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server = _start(command)
    signal.signal(signal.SIGTERM, lambda *_: _kill(server, signal.SIGTERM))
    _report_number(report, server)
    code = _wait(server, woken)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _report_number(report, code)
    _end_rest(server)
    for name in os.listdir(_REGIONS):
        if name.startswith(prefix):
            with suppress(OSError):
                os.unlink(f"{_REGIONS}/{name}")


def _start(command: list[str]) -> int:
    """Start the server in a session of its own; return its pid."""
    keeper = os.getpid()
    if (server := os.fork()) != 0:
        return server
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # in case this process is killed
        if os.getppid() != keeper:
            os._exit(_NOT_EXECUTED)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be executed: {error.strerror}\n".encode())
    os._exit(_NOT_EXECUTED)


def _wait(server: int, woken: int) -> int:
    """Reap children until the server ends; return its exit code."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == woken:
                os.read(woken, 512)
            else:  # nothing is ever written to stdin, so it was closed
                poll.unregister(0)
                _kill(server, signal.SIGKILL)
        pid = -1
        while pid != 0:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == server:
                return os.waitstatus_to_exitcode(status)


def _end_rest(group: int) -> None:
    """Kill until no child remains: orphans become children of this process meanwhile."""
    try:
        while True:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)  # most processes, at one moment
            for child in _list_children():
                _kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
    except ChildProcessError:
        return


def _list_children() -> list[int]:
    """Return the pids of all children."""
    keeper = str(os.getpid()).encode()
    children = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # the process has ended
            continue
        if fields[_PARENT] == keeper:
            children.append(int(name))
    return children


def _kill(pid: int, number: int) -> None:
    """Signal a child, whose pid is not reused before it is reaped."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _report_number(report: int, number: int) -> None:
    """Write a pid or an exit code to the adapter."""
    with suppress(BrokenPipeError):  # the adapter was killed
        os.write(report, f"{number}\n".encode())


def _prctl(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    main()
