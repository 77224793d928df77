"""A Debian made of its mirror's packages in a folder, and commands in it as a plain user.

It is a chroot, so that it needs no container engine: root and mmdebstrap are enough. Commands of a
`Machine` see their own processes.
"""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
USER, HOME = 1000, "/home/user"
# What the way to packages needs on some machines, and their certificates.
_PASSED_ON = re.compile(
    "PIP_(CERT|INDEX_URL|EXTRA_INDEX_URL|DEFAULT_TIMEOUT)|(https?|no)_proxy", re.IGNORECASE
)
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_MOUNTS = """
mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev"
mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm"
echo up
exec sleep infinity
"""


def _need() -> None:
    if os.getuid() != 0:
        pytest.skip("this is not root, so no Debian can be made")
    for program in ("mmdebstrap", "unshare", "nsenter", "chroot"):
        if shutil.which(program) is None:
            pytest.skip(f"no Debian can be made without {program}")
    if not SOURCES.exists():
        pytest.skip(f"no {SOURCES}, so the mirror is not known")


class Debian:
    """The folder of one release, with a plain user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def clone(self, name: str) -> str:
        """Copy what git knows of the repository, and what is new in it; return the path inside."""
        inside = f"{HOME}/{name}"
        listed = subprocess.run(
            ["git", "-C", ROOT, "ls-files", "-zco", "--exclude-standard"],
            capture_output=True,
            check=True,
        )
        for each in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / each).is_file():
                target = self.folder / inside[1:] / each
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / each, target)
        self._give(inside)
        return inside

    def _give(self, inside: str) -> None:
        subprocess.run(["chown", "-R", f"{USER}:{USER}", self.folder / inside[1:]], check=True)

    @contextmanager
    def up(self) -> Iterator["Machine"]:
        command = [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
            *("sh", "-ec", _MOUNTS, "sh", self.folder),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            try:
                assert holder.stdout is not None
                assert holder.stdout.readline() == "up\n"
                children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
                yield Machine(self, int(children.split()[0]))
            finally:
                holder.kill()  # and, by --kill-child, all that runs in there


class Machine:
    """What runs is a child of the first process in there, whose number out here is `pid`."""

    def __init__(self, debian: Debian, pid: int) -> None:
        self.debian = debian
        self._enter = ("nsenter", f"--target={pid}", "--mount", "--pid")

    def start(self, script: str, folder: str, *, log: Path | None = None) -> subprocess.Popen[str]:
        """Start bash on the script, as the user, in that folder. Without `log` it is piped."""
        environ = {
            **{k: v for k, v in os.environ.items() if _PASSED_ON.fullmatch(k)},
            "HOME": HOME,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
        }
        line = f"cd {shlex.quote(folder)}\n{script}"
        command = [
            *self._enter,
            *("chroot", f"--userspec={USER}:{USER}", self.debian.folder),
            *("env", "-i", *(f"{k}={v}" for k, v in environ.items())),
            *("bash", "-eu", "-o", "pipefail", "-c", line),
        ]
        with ExitStack() as files:
            out = files.enter_context(log.open("w")) if log else subprocess.PIPE
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def run(self, script: str, folder: str) -> tuple[int, str]:
        """Return the exit code and what it printed."""
        with self.start(script, folder) as process:
            try:
                said, _ = process.communicate(timeout=600)
            finally:
                process.kill()
            return process.returncode, said


@contextmanager
def debian(release: str, *packages: str) -> Iterator[Debian]:
    """Make one; it is removed in the end. Skips where that cannot be tried."""
    _need()
    with tempfile.TemporaryDirectory(prefix=f"{release}-") as made:
        folder = Path(made, "root")
        sources = Path(made, f"{release}.sources")
        first = SOURCES.read_text().partition("\n\n")[0]
        sources.write_text(
            re.sub("^Suites:.*", f"Suites: {release}", first, flags=re.MULTILINE) + "\n"
        )
        subprocess.run(
            [
                *("mmdebstrap", "--quiet", "--variant=minbase", "--skip=cleanup/apt/lists"),
                *(f"--include={','.join(['ca-certificates', *packages])}", release),
                *(folder, sources),
            ],
            check=True,
        )
        for each in (_CERTIFICATES, Path("/etc/resolv.conf")):
            if each.exists():
                shutil.copy(each, folder / str(each)[1:])
        (folder / HOME[1:]).mkdir(parents=True)
        os.chown(folder / HOME[1:], USER, USER)
        yield Debian(folder)


def wait_for(
    machine: Machine, folder: str, script: str, seconds: float, say: Mapping[str, Path]
) -> None:
    """Poll until the script succeeds."""
    end = time.monotonic() + seconds
    while machine.run(script, folder)[0] != 0:
        told = {name: path.read_text()[-3000:] for name, path in say.items()}
        assert time.monotonic() < end, f"not within {seconds} s: {script}\n{told}"
