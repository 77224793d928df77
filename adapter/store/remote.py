"""Reads buckets and web servers by obstore, which is an extra of the package."""

import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import (
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore

from adapter.errors import (
    AdapterError,
    InvalidArtifact,
    InvalidRequest,
    StoreDenied,
    StoreUnavailable,
)
from adapter.settings.locations import StoreKind, StoreLocation
from adapter.store.ports import Changed, StoredFile, failed, reason_in, status_in

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

_CHUNK_BYTES = 2**21  # to a thread and back costs 0.1 ms
_PAGE = 1000  # of a listing, at most
_ODD_KEY = re.compile(r'path:( "(?:[^"\\]|\\.){1,1024}")')  # in a text of obstore


class RemoteStore:
    """A bucket, a container or a web server.

    obstore itself retries requests, and continues answers that break off.
    """

    # `objects` adds the location's prefix to its keys
    def __init__(self, location: StoreLocation, objects: ObjectStore) -> None:
        self.location = location
        self._objects = objects

    async def stat(self, path: str) -> StoredFile | None:
        try:
            return _file(await obstore.head_async(self._objects, path))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._error(error, path) from error

    async def below(self, path: str, limit: int) -> list[StoredFile]:
        """Return nothing for a web server, which cannot list."""
        found: list[StoredFile] = []
        if self.location.kind is StoreKind.HTTP:
            return found
        try:
            async for some in obstore.list(self._objects, path, chunk_size=min(limit, _PAGE)):
                found += (replace(_file(m), is_exact=False, is_listed=True) for m in some)
                if len(found) >= limit:
                    break
        except Exception as error:
            raise self._error(error, path) from error
        return found[:limit]

    async def read(self, file: StoredFile, offset: int) -> AsyncGenerator[bytes, None]:
        options: GetOptions = {}
        if file.is_exact:
            options["if_match"] = file.etag
        if offset:
            options["range"] = {"offset": offset}
        try:
            result = await obstore.get_async(self._objects, file.path, options=options)
            _refuse_another(_file(result.meta), file)
            async for chunk in result.stream(min_chunk_size=_CHUNK_BYTES):
                yield chunk
        except (FileNotFoundError, PreconditionError) as error:
            raise Changed from error
        except Changed:
            raise
        except Exception as error:
            raise self._error(error, file.path) from error

    async def check(self) -> None:
        """Look for any object; on a web server for the first page, which need not be there."""
        if self.location.kind is StoreKind.HTTP:
            await self.stat("")
        else:
            await self.below("", 1)

    def _error(self, error: Exception, path: str) -> AdapterError:
        text = str(error)
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            reason = f"the store refuses access: {status_in(text)}"
            return StoreDenied(failed(self.location, path, reason))
        if isinstance(error, InvalidPathError):
            named = _ODD_KEY.search(text)
            reason = f"an object there{named[1] if named else ''} has a key that cannot be a path"
            return InvalidArtifact(failed(self.location, path, f"{reason}; rename or delete it"))
        if isinstance(error, ValueError):
            return InvalidRequest(failed(self.location, path, "no object can have this key"))
        return StoreUnavailable(failed(self.location, path, reason_in(text)))


def _refuse_another(found: StoredFile, wanted: StoredFile) -> None:
    if found.size_bytes != wanted.size_bytes:
        raise Changed
    if found.etag != wanted.etag and not wanted.is_listed:
        raise Changed


def _file(meta: "ObjectMeta") -> StoredFile:
    """Describe the object. Without an ETag, size and time stand for the version."""
    etag, size, modified = meta["e_tag"], meta["size"], meta["last_modified"].timestamp()
    version = etag or f"{size}-{modified:.0f}"
    is_exact = etag is not None and not etag.startswith("W/")
    return StoredFile(meta["path"], size, version, modified, is_exact)
