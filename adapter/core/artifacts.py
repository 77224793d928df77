"""Values that name and describe what a store holds: a model's package as an archive or a folder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from adapter.errors import InvalidRequest

MAX_ARTIFACT_PATH_BYTES = 1024
# S3's own limit of a key is 1024 bytes, too
_UNPRINTABLE = re.compile("[\x00\ud800-\udfff]")


class CacheUse(Enum):
    """Names what a call found of its model."""

    HIT = "hit"  # the model was loaded
    DISK = "disk"  # the files of the model were on disk
    MISS = "miss"


@dataclass(frozen=True, slots=True, order=True)
class ArtifactKey:
    """Names an artifact."""

    store: str  # the name of the endpoint; "" for `model_store`
    path: str  # of the archive or folder in the store, as parse_artifact_path returns it

    def __str__(self) -> str:
        return f"{self.store}/{self.path}" if self.store else self.path


@dataclass(frozen=True, slots=True)
class Artifact:
    """Describes an artifact on disk."""

    key: ArtifactKey
    folder: str  # the real path of the unpacked package
    etag: str  # names the version that the store had
    size_bytes: int  # on disk


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Says how full the disk cache is."""

    artifacts: int
    size_bytes: int  # taken by artifacts
    fetching_bytes: int  # reserved for fetches
    free_bytes: int  # left on the disk, within the limit
    limit_bytes: int
    undeleted_bytes: int = 0  # of files that should be gone and could not be deleted


@dataclass(slots=True)
class FetchProgress:
    """Counts the bytes of a fetch."""

    done_bytes: int = 0
    total_bytes: int | None = None  # None until the store has said it
    waited_seconds: float = 0.0  # for other fetches to end, before it began

    @property
    def percent(self) -> int | None:
        """Return how much has been fetched; None if nobody knows how much there is."""
        if not self.total_bytes:
            return None
        return min(100, 100 * self.done_bytes // self.total_bytes)


@dataclass(frozen=True, slots=True)
class PackageOnDisk:
    """Describes the copy of a package in the disk cache."""

    size_bytes: int
    etag: str
    last_used: float  # in seconds since 1970
    is_current: bool  # the store had this version when it was last asked


@dataclass(frozen=True, slots=True)
class StorePackage:
    """Describes a package that a store has. Figures are None where they are not known."""

    key: ArtifactKey
    size_bytes: int | None  # of the objects as the store has them
    etag: str | None  # names the version
    modified: float | None  # in seconds since 1970
    on_disk: PackageOnDisk | None


@dataclass(frozen=True, slots=True)
class PackagePage:
    """Holds a part of a store's listing."""

    packages: Sequence[StorePackage]
    after: str | None  # the next page begins behind this place; None at the end of the listing
    note: str | None = None  # why only packages on disk are listed


def parse_artifact_path(text: str) -> str:
    """Return `text`, if it is a path within a store. Raises InvalidRequest with the reason."""
    if not text:
        raise InvalidRequest("the key of the model is empty")
    if _UNPRINTABLE.search(text):
        raise InvalidRequest("the key of the model holds a NUL or is not valid UTF-8")
    if (size := len(text.encode())) > MAX_ARTIFACT_PATH_BYTES:
        raise InvalidRequest(
            f"the key of the model is {size} bytes long; "
            f"at most {MAX_ARTIFACT_PATH_BYTES} are accepted"
        )
    for does, is_so in (("begins", text.startswith("/")), ("ends", text.endswith("/"))):
        if is_so:
            raise InvalidRequest(f"the key {text!r} {does} with a slash")
    if any(part in {"", ".", ".."} for part in text.split("/")):
        raise InvalidRequest(f"the key {text!r} has a part that is empty, '.' or '..'")
    return text
