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
# of a region on 2.51. The bytes that they read must stay as they are.
_KEPT_BYTES = 64 * 1024


def find_environment(
    pid: int,
    since: float,  # seconds since 1970; an older folder is not this Triton's
) -> Path | None:
    """Return the folder in which Triton has unpacked the environment of a stub; None if none."""
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        match = next(filter(None, map(_STARTED_IN.match, variables)), None)
        if match is not None:
            place = _PLACE / match[1].decode()
            status = place.lstat()
            return place if _is_own(status) and status.st_mtime >= since else None
    return None


def note_environment(notes: Path, place: Path) -> None:
    """Note a folder of environments in the folder `notes`, to be removed by `remove_environments`.

    Raises OSError.
    """
    text = _identity(place.lstat())
    notes.mkdir(exist_ok=True)
    (notes / place.name).write_text(text)


def remove_environments(notes: Path) -> None:
    """Remove the noted folders, and the notes of those that are gone."""
    with suppress(OSError):
        for note in [*notes.iterdir()]:
            if _remove_environment(_PLACE / note.name, note.read_text()):
                note.unlink()
        notes.rmdir()


def _remove_environment(place: Path, identity: str) -> bool:
    """Remove the folder unless another has its name now; return whether nothing of it remains."""
    with suppress(FileNotFoundError):
        status = place.lstat()
        if _is_own(status) and _identity(status) == identity:
            shutil.rmtree(place, ignore_errors=True)
            return not place.exists()
    return True


def _is_own(status: os.stat_result) -> bool:
    """Return whether a Triton of this user has made the folder."""
    is_private = stat.S_IMODE(status.st_mode) == stat.S_IRWXU  # as mkdtemp makes it
    return stat.S_ISDIR(status.st_mode) and is_private and status.st_uid == os.geteuid()


def _identity(status: os.stat_result) -> str:
    return f"{status.st_dev} {status.st_ino}"


def free_region(region: Path) -> int:
    """Remove a region that Triton has mapped but no longer uses; return the bytes that are freed.

    Removing the file alone frees nothing while the mapping lives, and to shorten it would kill
    Triton at its next access. The result is 0 without such a region. Raises OSError if it cannot be
    freed.
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
