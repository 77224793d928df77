"""Reads buckets and web servers by obstore, which is an extra of the package."""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
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
from adapter.runtime import clock
from adapter.settings.locations import StoreKind, StoreLocation
from adapter.store.ports import (
    LISTED_AT_ONCE,
    Changed,
    NoListing,
    NoParts,
    StoredFile,
    describe_failure,
    find_code,
    find_reason,
    find_status,
)

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

_CHUNK_BYTES = 2**21  # to a thread and back costs 0.1 ms
# the status of a refusal, which S3 explains in a body that the answer to a HEAD does not have
_REFUSED = re.compile(r"\b(?:400 Bad Request|401 Unauthorized|403 Forbidden)")
_DENIED = re.compile(r"\b(?:401 Unauthorized|403 Forbidden)")
_NO_PARTS = re.compile(r"NotPartial|RangeNotSupported|UnexpectedRange|status code: (?:416|501)")
_ARCHIVED = "InvalidObjectState"
_WRONG_CLOCK = "RequestTimeTooSkewed"
# S3's codes for credentials that no further try will make good
_BAD_TOKENS = {
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the store does not know the session token",
    "TokenRefreshRequired": "the session token must be refreshed",
}
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
        """Return the object of exactly this key, as Store says."""
        try:
            return _make_file(await obstore.head_async(self._objects, path))
        except FileNotFoundError:
            return None
        except Exception as error:
            if self.location.kind is StoreKind.S3 and _is_unexplained(error):
                return await self._stat_by_get(path)
            raise self._make_error(error, path) from error

    async def _stat_by_get(self, path: str) -> StoredFile | None:
        """Describe the object as `stat` does, by a GET: a refusal of that has S3's code in its
        body.
        """
        try:
            return _make_file((await obstore.get_async(self._objects, path)).meta)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._make_error(error, path) from error

    async def list_below(self, path: str, limit: int) -> list[StoredFile]:
        """Return the objects below the folder, as Store says; none for a web server, which cannot
        list.
        """
        files: list[StoredFile] = []
        if self.location.kind is StoreKind.HTTP:
            return files
        try:
            async for some in obstore.list(
                self._objects, path, chunk_size=min(limit, LISTED_AT_ONCE)
            ):
                files += (replace(_make_file(m), is_exact=False, is_listed=True) for m in some)
                if len(files) >= limit:
                    break
        except Exception as error:
            raise self._make_error(error, path) from error
        return files[:limit]

    async def list_after(self, path: str) -> AsyncGenerator[Sequence[StoredFile], None]:
        """Yield all objects whose keys follow `path`, as Store says."""
        if self.location.kind is StoreKind.HTTP:
            raise NoListing(
                describe_failure(self.location, "", "a web server cannot list its files")
            )
        try:
            pages = obstore.list(self._objects, offset=path or None, chunk_size=LISTED_AT_ONCE)
            async for page in pages:
                yield [_make_file(meta) for meta in page]
        except Exception as error:
            raise self._make_error(error, "") from error

    async def read(self, file: StoredFile, offset: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield the content from `offset` to before `end`, as Store says."""
        options: GetOptions = {}
        if file.is_exact:
            options["if_match"] = file.etag
        if end < file.size_bytes:
            options["range"] = (offset, end)
        elif offset:
            options["range"] = {"offset": offset}
        try:
            result = await obstore.get_async(self._objects, file.path, options=options)
            try:
                _refuse_other_version(_make_file(result.meta), file)
                async for chunk in result.stream(min_chunk_size=_CHUNK_BYTES):
                    yield chunk
            finally:
                del result  # closes the connection, though an error may keep this frame
        except (FileNotFoundError, PreconditionError) as error:
            raise Changed from error
        except Changed:
            raise
        except Exception as error:
            raise self._make_error(error, file.path) from error

    async def check(self) -> None:
        """Look for any object; on a web server for the first page, which need not be there.

        A store whose first key cannot be a path has answered, and serves its other keys.
        """
        if self.location.kind is StoreKind.HTTP:
            await self.stat("")
        else:
            with suppress(InvalidArtifact):
                await self.list_below("", 1)

    def _make_error(self, error: Exception, path: str) -> AdapterError:
        """Return the error for what obstore has raised.

        It is InvalidArtifact for an archived object or an odd key, InvalidRequest for a key that no
        object can have, StoreDenied, NoParts, or else StoreUnavailable.
        """
        text = str(error)
        if isinstance(error, InvalidPathError):
            named = _ODD_KEY.search(text)
            reason = f"an object there{named[1] if named else ''} has a key that cannot be a path"
            return InvalidArtifact(
                describe_failure(self.location, path, f"{reason}; rename or delete it")
            )
        if isinstance(error, ValueError):
            return InvalidRequest(
                describe_failure(self.location, path, "no object can have this key")
            )
        status = find_status(text)
        if find_code(text) == _ARCHIVED:
            reason = f"the object is archived: restore it, or copy it to another class: {status}"
            return InvalidArtifact(describe_failure(self.location, path, reason))
        if (denial := _find_denial(error)) is not None:
            return StoreDenied(describe_failure(self.location, path, denial))
        kind = NoParts if _NO_PARTS.search(text) else StoreUnavailable
        return kind(describe_failure(self.location, path, find_reason(text)))


def _is_unexplained(error: Exception) -> bool:
    """Return whether a refusal came without the body that says why."""
    text = str(error)
    return _REFUSED.search(find_status(text)) is not None and not find_code(text)


def _find_denial(error: Exception) -> str | None:
    """Return why the store refuses access; None for any other failure."""
    text = str(error)
    status = find_status(text)
    code = find_code(text)
    if code in _BAD_TOKENS:
        return f"{_BAD_TOKENS[code]}: {status}"
    is_denied = isinstance(error, PermissionDeniedError | UnauthenticatedError)
    if not is_denied and not (_DENIED.search(status) and code):
        return None
    if code == _WRONG_CLOCK:
        now = datetime.fromtimestamp(clock.wall(), UTC)
        return f"the store does not accept this machine's clock, which says {now:%c} UTC: {status}"
    if code or not status:
        return f"the store refuses access: {status}"
    return (
        f"the store refuses access: {status}; check the credentials, and that this machine's clock"
        " is right"
    )


def _refuse_other_version(present: StoredFile, wanted: StoredFile) -> None:
    if present.size_bytes != wanted.size_bytes:
        raise Changed
    if present.etag != wanted.etag and not wanted.is_listed:
        raise Changed


def _make_file(meta: "ObjectMeta") -> StoredFile:
    """Describe the object. Without an ETag, size and time stand for the version."""
    etag = meta["e_tag"]
    size = meta["size"]
    modified = meta["last_modified"].timestamp()
    version = etag or f"{size}-{modified:.0f}"
    is_exact = etag is not None and not etag.startswith("W/")
    return StoredFile(meta["path"], size, version, modified, is_exact)
