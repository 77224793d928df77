"""The program of the process that unpacks one archive. It imports nothing outside the standard
library but the modules that unpack, as imports are most of its start.

Arguments: the adapter's pid, with which this process ends, and a job as JSON: `archive`, `target`
and `content` of `archives.unpack`, `limits`, and whether it `asks` for room. stdout is a socket:
an error is written to it as a line of JSON, and so are the bytes and inodes that room is asked for,
which a byte answers.
"""

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from adapter.errors import AdapterError
from adapter.packages.source.archives import unpack
from adapter.packages.source.unpacking import Limits

_PR_SET_PDEATHSIG = 1
_STDOUT = 1
# Where all want the CPU this process gets a third of what one of the usual priority gets, so three
# large archives weigh as much as one such process. Less than that made nobody's wait shorter.
_NICE = 5


def main() -> None:
    parent, job = int(sys.argv[1]), json.loads(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        return
    _give_way()
    archive, target, content = (Path(job[key]) for key in ("archive", "target", "content"))
    try:
        room = _ask if job["asks"] else None
        unpack(archive, target, Limits(**job["limits"]), content=content, room=room)
    except AdapterError as error:
        _tell({"error": type(error).__name__, "text": str(error)})


def _ask(count: int, inodes: int) -> None:
    """Wait until the adapter has room on disk for so much; it ends this process if not."""
    _tell({"room": count, "inodes": inodes})
    if not os.read(_STDOUT, 1):
        sys.exit(1)


def _tell(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _give_way() -> None:
    """Lower the priority, after the start, which is short. With autogroups (sched(7)) it counts
    within a session only, so that of the session is lowered as well; not every Linux has them.
    """
    with suppress(OSError):
        os.nice(_NICE)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(f"{_NICE}")
