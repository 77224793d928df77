"""What files take of a disk, and how much of it is left to others."""

import os
from dataclasses import dataclass

# Not what statvfs says: network file systems say the 1 MiB that they transfer at a time.
BLOCK_BYTES = 4096
# The rest of the disk is not for packages: other programs, and Triton, write to it as well.
RESERVE_BYTES = 2**30
RESERVE_INODES = 4096


@dataclass(frozen=True, slots=True)
class Free:
    """`inodes`: how many files, folders and links can still be made; None for a file system that
    has no such limit.
    """

    bytes: int
    inodes: int | None


def free_at(folder: str | os.PathLike[str]) -> Free:
    found = os.statvfs(folder)
    return Free(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)


def disk_bytes(size: int = 0) -> int:
    """Return what a file of so many bytes takes; a folder, a link and what is
    empty take a block.
    """
    return max(BLOCK_BYTES, size + -size % BLOCK_BYTES)
