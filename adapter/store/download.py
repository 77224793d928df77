"""Downloads one object in order, by several connections where that is faster.

A large object is requested in parts, several at a time, each of the same version (If-Match). The
parts are buffered, and handed on in the order of the object. A connection that breaks is continued
within its part. Where a store serves no parts, or the version cannot be named, there is one
connection and no continuation.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from adapter.errors import StoreUnavailable
from adapter.store.ports import NoParts, Store, StoredFile, Unfinished, describe_failure

# Requests without a byte of new content, one after the other, before a download is given up. Each
# was tried several times by obstore.
_MAX_IDLE_TRIES = 2
# A part takes a tenth of a second and more where a connection is slow enough for parts to help.
PART_BYTES = 2**24
MIN_SPLIT_BYTES = 2 * PART_BYTES
_MAX_PARTS_AT_ONCE = 8
_MAX_CHUNKS = 8  # of one part that wait for those before it; a chunk has 2 MiB
MAX_CONNECTIONS = 16


@dataclass(slots=True)
class _Part:
    """Some bytes of the object, which a task downloads."""

    start: int
    end: int
    is_extra: bool  # its connection counts, as it is not the first one of the download
    # ended by None, or by what has ended the task
    chunks: asyncio.Queue[bytes | Exception | None] = field(
        default_factory=lambda: asyncio.Queue(_MAX_CHUNKS)
    )
    task: asyncio.Task[None] = field(init=False)

    def is_one_of_many(self, file: StoredFile) -> bool:
        """Return whether the object has more bytes than this part."""
        return self.end - self.start < file.size_bytes


class Download:
    """Downloads one version of one object."""

    def __init__(
        self,
        store: Store,
        file: StoredFile,
        connections: asyncio.Semaphore,  # of the process, beyond the first one of each download
    ) -> None:
        self._store = store
        self._file = file
        self._connections = connections
        self._is_slowed = False  # the store cannot serve as many requests as it got

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the content in order, and exactly as many bytes as the store has said.

        Raises Changed, StoreDenied and StoreUnavailable.
        """
        size_bytes = self._file.size_bytes
        can_split = self._file.is_exact and not self._store.location.is_folder
        if can_split and size_bytes >= MIN_SPLIT_BYTES:
            has_begun = False
            try:
                async with aclosing(self._read_parts(PART_BYTES)) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        yield chunk
                    return
            except NoParts as error:
                if has_begun:
                    raise StoreUnavailable(str(error)) from error
        async with aclosing(self._read_parts(size_bytes)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _read_parts(self, part_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yield the content, from parts of so many bytes."""
        size_bytes = self._file.size_bytes
        starts = deque(range(0, max(size_bytes, 1), max(part_bytes, 1)))
        parts: deque[_Part] = deque()
        try:
            while starts or parts:
                while starts and self._can_begin(len(parts)):
                    if parts:
                        await self._connections.acquire()
                    start = starts.popleft()
                    end = min(start + part_bytes, size_bytes)
                    parts.append(self._start_part(_Part(start, end, is_extra=bool(parts))))
                while (chunk := await parts[0].chunks.get()) is not None:
                    if isinstance(chunk, Exception):
                        try:
                            raise chunk
                        finally:
                            del chunk  # an error in a frame of its own traceback is a cycle
                    yield chunk
                parts.popleft()
        finally:
            for part in parts:
                part.task.cancel()
            await asyncio.gather(*(part.task for part in parts), return_exceptions=True)

    def _can_begin(self, count: int) -> bool:
        """Return whether to begin another part beside so many; the first one always may."""
        if not count:
            return True
        can_add = count < _MAX_PARTS_AT_ONCE and not self._is_slowed
        return can_add and not self._connections.locked()

    def _start_part(self, part: _Part) -> _Part:
        part.task = asyncio.create_task(self._download(part))
        if part.is_extra:
            part.task.add_done_callback(lambda _: self._connections.release())
        return part

    async def _download(self, part: _Part) -> None:
        """Download one part into its queue. The task keeps no error: its frames would keep the
        connection, and refer to the task again.
        """
        try:
            await self._download_all(part)
        except Exception as error:  # noqa: BLE001 - raised by whoever reads the queue
            await part.chunks.put(error)
        else:
            await part.chunks.put(None)

    async def _download_all(self, part: _Part) -> None:
        """Request the part, and what is missing of it where a connection broke."""
        position = part.start
        idle_tries = 0
        while True:
            received, error = await self._request(part, position)
            position += received
            idle_tries = 0 if received else idle_tries + 1
            if position > part.end:
                raise self._make_length_error(position)
            if position == part.end:
                return
            self._is_slowed = True
            if isinstance(error, NoParts) and part.is_one_of_many(self._file):
                raise error
            if not self._file.is_exact:
                raise Unfinished(str(error or self._make_length_error(position)))
            if idle_tries == _MAX_IDLE_TRIES:
                raise StoreUnavailable(str(error or self._make_length_error(position)))

    async def _request(self, part: _Part, position: int) -> tuple[int, StoreUnavailable | None]:
        """Queue what one request brings. Return the bytes that came, and why no more did."""
        received = 0
        try:
            async with aclosing(self._store.read(self._file, position, part.end)) as chunks:
                async for chunk in chunks:
                    received += len(chunk)
                    if position + received > part.end:
                        break
                    await part.chunks.put(chunk)
        except StoreUnavailable as error:
            return received, error
        return received, None

    def _make_length_error(self, position: int) -> StoreUnavailable:
        """Return the error for content that ended, or went on, at `position`."""
        size_bytes = self._file.size_bytes
        sent = "more than" if position > size_bytes else f"{position} of"
        reason = f"the store sent {sent} {size_bytes} bytes"
        return StoreUnavailable(describe_failure(self._store.location, self._file.path, reason))
