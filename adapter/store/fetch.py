"""Brings an artifact from its store to disk. An archive is unpacked while it arrives, by a process
that reads it from a pipe; a zip, whose directory is at its end, is downloaded first.
"""

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, suppress
from hashlib import md5
from pathlib import Path

from adapter.core.artifacts import FetchProgress
from adapter.errors import AdapterError, InvalidArtifact, InvalidModel, NoRoom
from adapter.packages.archive_kinds import HEAD_BYTES, can_stream, is_packed
from adapter.packages.contents import MAX_DEPTH, MAX_ENTRIES
from adapter.packages.roots import Inside, Opened
from adapter.packages.unpack import Limits
from adapter.packages.unpacking_process import Pipe, UnpackingProcess
from adapter.runtime.threads import CACHE, FETCHED, PIPES
from adapter.store.checksums import Checksums
from adapter.store.disk import Reservation
from adapter.store.download import Download
from adapter.store.ports import Changed, Store, StoredFile, describe_failure
from adapter.store.versions import Version

_FILES_AT_ONCE = 8
_LARGE_BYTES = 2**23  # beside so many bytes a further request takes little
_MAX_NAME_BYTES = 255  # of one file or folder, on every Linux file system
_KILL_SECONDS = 5.0  # a process that waits for a disk may not end
_PIPE_BYTES = 2**20  # the most that Linux allows everybody


class RoomOfProcess:
    """The room on disk that a process unpacks into, for the thread that talks to that process."""

    def __init__(self, reservation: Reservation) -> None:
        self._reservation = reservation
        self._loop = asyncio.get_running_loop()
        self._asking: asyncio.Task[None] | None = None
        self._is_closed = False

    def reserve(self, count: int, inodes: int) -> None:
        """Reserve what is about to be written, as Reservation.write says."""
        work = self._reserve_unless_closed(count, inodes)
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Grant nothing more. To be called in the event loop."""
        self._is_closed = True
        if self._asking is not None:
            self._asking.cancel()

    async def _reserve_unless_closed(self, count: int, inodes: int) -> None:
        self._asking = asyncio.current_task()
        if self._is_closed:
            raise asyncio.CancelledError
        await self._reservation.write(count, inodes)


class Fetch:
    """Fetches one version into `work`, once. After an error the caller removes what is there."""

    def __init__(
        self,
        store: Store,
        version: Version,
        *,
        work: Path,
        reservation: Reservation,
        progress: FetchProgress,
        limits: Limits,
        connections: asyncio.Semaphore,  # as in Download
        unpackings: asyncio.Semaphore,  # has a place for each thread of FETCHED
        checksums: Checksums,
    ) -> None:
        self._connections = connections
        self._unpackings = unpackings
        self._checksums = checksums
        self._wrong_sums: dict[str, str] = {}  # MD5 of what came otherwise, by key
        self._store = store
        self._version = version
        self._reservation = reservation
        self._progress = progress
        self._limits = limits
        self._name = version.name
        self._part = work / "part" / self._name
        self._files = work / "files"

    async def run(self) -> None:
        """Fetch and unpack into `work`/files.

        Raises Changed if the store has another version meanwhile, BeginsAgain, Unfinished,
        StoreDenied, StoreUnavailable, InvalidArtifact, NoRoom, or OSError of the disk.
        """
        version = self._version
        self._refuse_names()
        self._progress.done_bytes = 0
        self._progress.total_bytes = version.size_bytes
        if version.is_folder:
            self._refuse_too_much()
        await self._reservation.reserve(version.disk_bytes, len(version.files))
        await CACHE.run_to_end(self._files.mkdir)
        if version.is_folder:
            await self._fetch_folder(self._files / self._name)
        else:
            await self._fetch_object(version.files[0])
        self._checksums.check(self._wrong_sums)

    # -- one object -------------------------------------------------------------------------

    async def _fetch_object(self, file: StoredFile) -> None:
        """Fetch an archive or a lone file, which its name and its first bytes tell apart."""
        async with aclosing(self._download(file)) as chunks:
            head = b""
            async for chunk in chunks:
                head += chunk
                if len(head) >= HEAD_BYTES:
                    break
            if can_stream(self._name, head):
                async with self._unpackings:
                    await self._unpack_chunks(file, head, chunks)
            elif is_packed(self._name):
                await CACHE.run_to_end(self._part.parent.mkdir)
                await self._write_chunks(file, self._part, head, chunks)
                async with self._unpackings:
                    await self._unpack_file()
            else:
                await self._write_chunks(file, self._files / self._name, head, chunks)

    async def _download(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """Yield the content of an object; at its end compare its MD5 sum, where that is known."""
        expected = self._checksums.expected(file)
        digest = md5(usedforsecurity=False)
        async with aclosing(Download(self._store, file, self._connections).chunks()) as chunks:
            async for chunk in chunks:
                self._progress.done_bytes += len(chunk)
                if expected is not None:
                    await PIPES.run(digest.update, chunk)
                yield chunk
        if expected is not None and digest.hexdigest() != expected:
            self._wrong_sums[file.path] = digest.hexdigest()

    async def _write_chunks(
        self, file: StoredFile, target: Path, head: bytes, chunks: AsyncGenerator[bytes, None]
    ) -> None:
        """Write one object to `target`, whose first bytes have come already."""
        with ExitStack() as stack:
            descriptor = await CACHE.run_to_end(_open_new, target, stack)
            await self._write_chunk(descriptor, head)
            async for chunk in chunks:
                await self._write_chunk(descriptor, chunk)
            os.utime(descriptor, (file.modified, file.modified))

    async def _write_chunk(self, descriptor: int, chunk: bytes) -> None:
        """Wait for room on disk for a chunk, then write it."""
        await self._reservation.write(len(chunk))
        await CACHE.run_to_end(_write_all, descriptor, chunk)

    # -- a folder ---------------------------------------------------------------------------

    async def _fetch_folder(self, target: Path) -> None:
        await CACHE.run_to_end(target.mkdir)
        turns = asyncio.Semaphore(_FILES_AT_ONCE)

        async def fetch(file: StoredFile) -> None:
            async with turns:
                await self._fetch_file(file, target / file.path[len(self._version.path) + 1 :])

        tasks = [asyncio.create_task(fetch(file)) for file in self._version.files]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch_file(self, file: StoredFile, target: Path) -> None:
        """Fetch an object. An empty one that is not there stands for an empty folder, with a slash
        at the end of its key.
        """
        await self._reservation.write(0, inodes=1)
        await CACHE.run_to_end(_make_folder, target.parent)
        try:
            exact = await self._find_exact(file)
            async with aclosing(self._download(exact)) as chunks:
                await self._write_chunks(exact, target, b"", chunks)
        except Changed:
            if file.size_bytes:
                raise
            await CACHE.run_to_end(target.unlink)
            await CACHE.run_to_end(target.mkdir)

    async def _find_exact(self, file: StoredFile) -> StoredFile:
        """Ask the store for a large file that was only listed, as its download goes on by the exact
        ETag; return other files as they are.

        Raises Changed if the file is gone or has another size.
        """
        if not file.is_listed or file.size_bytes < _LARGE_BYTES:
            return file
        exact = await self._store.stat(file.path)
        if exact is None or exact.size_bytes != file.size_bytes:
            raise Changed
        return exact

    def _refuse_too_much(self) -> None:
        if len(self._version.files) > MAX_ENTRIES:
            raise self._make_invalid(f"it holds more than {MAX_ENTRIES} objects")

    def _refuse_names(self) -> None:
        for file in self._version.files:
            parts = file.path[len(self._version.path) + 1 :].split("/")
            if len(parts) > MAX_DEPTH or any(
                part in {".", ".."} or "\0" in part or len(os.fsencode(part)) > _MAX_NAME_BYTES
                for part in (*parts, self._name)
            ):
                raise self._make_invalid(
                    f"{file.path[:1024]!r} cannot be the path of a file: a part is '.', '..' or"
                    f" over {_MAX_NAME_BYTES} bytes, or there are more than {MAX_DEPTH} parts"
                )

    def _make_invalid(self, reason: str) -> InvalidArtifact:
        return InvalidArtifact(describe_failure(self._store.location, self._version.path, reason))

    # -- an archive -------------------------------------------------------------------------

    async def _unpack_chunks(
        self, file: StoredFile, head: bytes, chunks: AsyncGenerator[bytes, None]
    ) -> None:
        """Unpack an archive whose first bytes have come already, as the others come."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        with suppress(OSError):  # the pipe is smaller then, and slower
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        pipe = Pipe(reader, file.size_bytes)
        feeding = asyncio.ensure_future(_feed(writer, head, chunks))
        try:
            await self._unpack(Path(self._name), pipe, feeding)
        finally:
            pipe.close()
            feeding.cancel()
            await asyncio.wait({feeding})

    async def _unpack_file(self) -> None:
        """Unpack an archive that was downloaded, and remove it."""
        with Inside([str(self._part.parent)]).open_entry(str(self._part)) as content:
            await self._unpack(self._part, content)
        await CACHE.run_to_end(self._part.unlink)

    async def _unpack(
        self,
        archive: Path,
        content: Opened | Pipe,
        feeding: asyncio.Future[None] | None = None,
    ) -> None:
        """Unpack until the process has ended, or `feeding` has failed. After cancellation nothing
        is written.
        """
        unpacking = UnpackingProcess()
        room = RoomOfProcess(self._reservation)
        work = asyncio.ensure_future(
            FETCHED.run_to_end(self._unpack_by, unpacking, archive, content, room)
        )
        try:
            ends = [work, *([feeding] if feeding else [])]
            await asyncio.wait(ends, return_when=asyncio.FIRST_EXCEPTION)
            if feeding is not None and feeding.done() and not work.done():
                feeding.result()  # raise what has ended the download
        finally:
            if not work.done():
                room.close()
                unpacking.kill()
                work.cancel()
                await asyncio.wait({work}, timeout=_KILL_SECONDS)
        work.result()

    def _unpack_by(
        self,
        unpacking: UnpackingProcess,
        archive: Path,
        content: Opened | Pipe,
        room: RoomOfProcess,
    ) -> None:
        """Run the process that unpacks. For threads.

        Raises NoRoom, and InvalidArtifact for an archive or a model that is refused; the texts of
        errors name the place in the store, and no path of this machine.
        """
        target = self._files / self._name
        try:
            unpacking.run(archive, target, self._limits, content, room.reserve)
        except (InvalidArtifact, NoRoom):  # the reservation has said what, and where
            raise
        except AdapterError as error:  # callers see no path of this machine
            place = self._store.location.place(self._version.path)
            reason = str(error).removeprefix(f"{archive}: ").replace(str(archive), self._name)
            text = f"the archive cannot be unpacked ({place}): {reason}"
            if isinstance(error, InvalidModel):
                raise InvalidArtifact(text) from error
            error.args = (text.replace(str(self._files.parent), "the cache"),)
            raise


async def _feed(writer: int, head: bytes, chunks: AsyncGenerator[bytes, None]) -> None:
    """Write an archive to a pipe, and close it. A reader that ends before has an error to report:
    it succeeds only once the pipe is closed.
    """
    try:
        with suppress(BrokenPipeError):
            await PIPES.run_to_end(_write_all, writer, head)
            async for chunk in chunks:
                await PIPES.run_to_end(_write_all, writer, chunk)
    finally:
        os.close(writer)


def _open_new(target: Path, stack: ExitStack) -> int:
    """Make a file and open it for writing. The stack closes it, also if the caller was cancelled
    before it had the descriptor.
    """
    descriptor = os.open(target, os.O_CREAT | os.O_WRONLY | os.O_EXCL)
    stack.callback(os.close, descriptor)
    return descriptor


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def _write_all(descriptor: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]
