"""Defines what the cache needs of a store, of whatever kind, and words its errors.

obstore's texts hold addresses, headers and answers of the server, among them what may be secret. So
a text is only searched for phrases that are known to be safe.
"""

import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from adapter.errors import StoreUnavailable
from adapter.settings.locations import StoreLocation

LISTED_AT_ONCE = 1000  # objects in a part of a listing
_STATUS = re.compile(r"status code: (\d{3} [A-Za-z -]{1,40})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,40})</Code>")
_NO_CREDENTIALS = "no credentials for it were found"
_METADATA_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
# phrases of obstore, of its HTTP client and of the system, and what they mean; the first one counts
_REASONS = (
    *((server, _NO_CREDENTIALS) for server in _METADATA_SERVERS),
    ("TimedOut", "it did not answer in time"),
    ("kind: Timeout", "it did not answer in time"),
    ("Connection refused", "connection refused"),
    ("dns error", "its name cannot be resolved"),
    ("certificate", "its certificate is not accepted"),
    ("MissingContentLength", "its answer does not say how long the object is"),
    ("NotPartial", "it does not serve parts of an object"),
    ("RangeNotSupported", "it does not serve parts of an object"),
    ("UnexpectedRange", "it served another part of the object than was asked for"),
    ("IncompleteBody", "the connection broke"),
    ("ConnectionReset", "the connection broke"),
    ("kind: Interrupted", "the connection broke"),
    ("IncompleteMessage", "it closes connections without an answer"),
    ("BareRedirect", "it redirects and does not say where; is AWS_REGION that of the bucket?"),
    ("kind: Redirect", "it redirects too often"),
    ("source: Header", "its answer lacks what is needed to fetch an object"),
    ("Parse(", "its answer is not HTTP"),
)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An object of a store."""

    path: str  # the key below the store's prefix
    size_bytes: int
    etag: str  # names its version
    modified: float  # in seconds since 1970
    # no two contents share the ETag, so that a cut download may continue
    is_exact: bool = True
    # the ETag is that of a listing, which some servers write otherwise than that of an answer
    is_listed: bool = False


class Changed(Exception):
    """The object is gone, or has another version than the requested one."""


class NoParts(StoreUnavailable):
    """The store does not serve parts of an object, or sends another part than the requested one."""


class NoListing(StoreUnavailable):
    """The store cannot list its objects."""


class Unfinished(StoreUnavailable):
    """A download has failed that can only begin anew; the next one may succeed."""


class Store(Protocol):
    """Reads objects by key. Raises StoreDenied, StoreUnavailable, and InvalidRequest for a key that
    no object can have. Error texts name bucket and key, never credentials.
    """

    @property
    def location(self) -> StoreLocation:
        """Return where the store is."""

    async def stat(self, path: str) -> StoredFile | None:
        """Return the object of exactly this key; None only if there surely is none."""

    async def list_below(self, path: str, limit: int) -> list[StoredFile]:
        """Return the objects below the folder, at most `limit`, in no order; there may be none."""

    def list_after(self, path: str) -> AsyncGenerator[Sequence[StoredFile], None]:
        """Yield all objects whose keys follow `path`, sorted by key, in parts of a limited size.

        Raises NoListing for a store that cannot list.
        """

    def read(self, file: StoredFile, offset: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield the content from `offset` to before `end`. Raises Changed for another version than
        `file`, of which a listed one has its size alone, and NoParts; a connection that breaks is
        StoreUnavailable.
        """

    async def check(self) -> None:
        """Raise an error if the store cannot be used now."""


class DiskEvictor(Protocol):
    """Unloads models, so that their files may leave the disk for others."""

    async def unload_one(self, missing_bytes: int) -> bool:
        """Unload the least recently used of the models that `missing_bytes` need.

        Return False when none may be unloaded now.
        """

    @property
    def can_unload_later(self) -> bool:
        """Whether any model may be unloaded, now or once what keeps it is over."""

    def unevictable_bytes(self) -> int:
        """Return the bytes on disk of loaded models that are never unloaded for others."""


def describe_failure(location: StoreLocation, path: str, reason: str) -> str:
    """Return the text of a failure, in SageMaker's words."""
    return f"{describe_place(location, path)}: {reason}"


def describe_place(location: StoreLocation, path: str) -> str:
    """Return what failed, and where: the words before the reason. Without a path that is the check
    of the whole store.
    """
    act = "download model data" if path else "look into the store"
    return f"Failed to {act} ({location.place(path)})"


def find_status(text: str) -> str:
    """Return the HTTP status in a text of obstore, with S3's own code for it."""
    status = _STATUS.search(text)
    words = [status[1].strip() if status else "", find_code(text)]
    return ", ".join(filter(None, words))


def find_code(text: str) -> str:
    """Return S3's own code in a text of obstore; empty where the answer had none."""
    code = _CODE.search(text)
    return code[1] if code else ""


def find_reason(text: str) -> str:
    """Return why a request failed, by a text of obstore."""
    status = find_status(text)
    if status and not any(server in text for server in _METADATA_SERVERS):
        return f"the store answered {status}"
    known = next((reason for phrase, reason in _REASONS if phrase in text), None)
    return f"the store cannot be used: {known}" if known else "the store cannot be reached"
