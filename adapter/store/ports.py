"""What the cache asks of a store, whatever kind it is."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from adapter.settings.locations import StoreLocation


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An object of a store. `path` is the key below the store's prefix, `etag` names its version,
    `modified` is in seconds since 1970. `is_exact`: two contents never share the ETag, so that a
    cut download may go on where it was. `is_listed`: the ETag is that of a listing, which some
    servers write otherwise than that of an answer.
    """

    path: str
    size_bytes: int
    etag: str
    modified: float
    is_exact: bool = True
    is_listed: bool = False


class Changed(Exception):
    """The object is gone, or is another version than the one that was asked for."""


class Store(Protocol):
    """Its errors: StoreDenied, StoreUnavailable, and InvalidRequest for a key that it can have no
    object of. Their texts name bucket and key, never credentials.
    """

    @property
    def location(self) -> StoreLocation: ...
    async def stat(self, path: str) -> StoredFile | None:
        """Return the object of exactly this key; None only if there surely is none."""

    async def below(self, path: str, limit: int) -> list[StoredFile]:
        """Return the objects below the folder, at most `limit`, in no order; there may be none."""

    def read(self, file: StoredFile, offset: int) -> AsyncGenerator[bytes, None]:
        """Yield the content from `offset` on. Raises Changed for another version than `file`, of
        which a listed one has its size alone; a connection that breaks is StoreUnavailable.
        """

    async def check(self) -> None:
        """Raise an error if the store cannot be used now."""
