"""Frees what Triton leaves behind: shared memory of dead processes, and unpacked environments.

Each tritonserver makes a folder for the Python environments of models, /tmp/python_env_XXXXXX,
whatever TMPDIR says, and leaves it behind when it is killed. Others of the same user do so beside
it, so a folder is ours only if a stub of our server was started in it: Triton puts its `lib` in
front of the stub's LD_LIBRARY_PATH. Its name and inode are noted in the run folder, and by these it
is removed once the server has ended.
"""

import mmap
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

_PLACE = Path("/tmp")  # noqa: S108 - where Triton makes it
_STARTED_IN = re.compile(rb"LD_LIBRARY_PATH=/tmp/(python_env_\w{6})/\d+/lib(:|$)")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton puts them
# Threads of Triton that served the process wait for ever on its message queues, seen below 36 KiB
# of a region on 2.51. What they look at must stay as it is.
_KEPT_BYTES = 64 * 1024


def environment_of(pid: int, since: float) -> Path | None:
    """Return the folder in which Triton has unpacked the environment of this stub; None if it has
    none. What was there before `since` (time.time) is not this Triton's.
    """
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found = next(filter(None, map(_STARTED_IN.match, variables)), None)
        if found is not None:
            place = _PLACE / found[1].decode()
            return place if _is_own(status := place.lstat()) and status.st_mtime >= since else None
    return None


def note_environment(notes: Path, place: Path) -> None:
    """Note the folder, to be removed by `remove_environments`. Raises OSError."""
    text = _identity(place.lstat())
    notes.mkdir(exist_ok=True)
    (notes / place.name).write_text(text)


def remove_environments(notes: Path) -> None:
    """Remove the noted folders, and the notes of those that are gone."""
    with suppress(OSError):
        for each in [*notes.iterdir()]:
            if not _remains(_PLACE / each.name, each.read_text()):
                each.unlink()
        notes.rmdir()


def _remains(place: Path, identity: str) -> bool:
    """Remove the folder, if it still is the one; return whether some of it is left."""
    with suppress(FileNotFoundError):
        status = place.lstat()
        if _is_own(status) and _identity(status) == identity:
            shutil.rmtree(place, ignore_errors=True)
            return place.exists()
    return False


def _is_own(status: os.stat_result) -> bool:
    is_private = stat.S_IMODE(status.st_mode) == stat.S_IRWXU  # as mkdtemp makes it
    return stat.S_ISDIR(status.st_mode) and is_private and status.st_uid == os.geteuid()


def _identity(status: os.stat_result) -> str:
    return f"{status.st_dev} {status.st_ino}"


def free_region(region: Path) -> int:
    """Remove a region that Triton has mapped but no longer uses; return the bytes given back.

    Removing the file alone gives nothing back while the mapping lives, and to shorten it would
    kill Triton at its next access. 0 if there is no such region. OSError if it cannot be freed.
    """
    try:
        descriptor = os.open(region, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        before = os.fstat(descriptor)
        if before.st_size > _KEPT_BYTES:
            with mmap.mmap(descriptor, before.st_size) as pages:
                # as fallocate with PUNCH_HOLE | KEEP_SIZE
                pages.madvise(mmap.MADV_REMOVE, _KEPT_BYTES)
        region.unlink(missing_ok=True)
        return (before.st_blocks - os.fstat(descriptor).st_blocks) * 512
    finally:
        os.close(descriptor)
