"""Unpacks the archive of a model package, and trusts nothing that it says.

An archive may come from anybody who may name a model. So it is read in a process of its own, which
unpacking_process.py starts, and which runs `main`; the adapter itself never imports this module.
tarfile and zipfile only read the archive; what may be written is for unpack.py to say, since
what the `filter` of tarfile refuses differs from one Python to the next. Imports are most of the
start of the process: there are none but the standard library and the modules that unpack.
"""

import ctypes
import io
import json
import os
import shutil
import signal
import stat
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from adapter.errors import AdapterError, BackendError
from adapter.packages.archive_kinds import HEAD_BYTES, kind_by_head, kind_of
from adapter.packages.messages import shown
from adapter.packages.unpack import CHUNK, MAX_NAME_BYTES, Limits, Unpacking

try:
    # of the extra `store`: unpacks two to three times as fast what packs well
    from isal import isal_zlib as inflating
except ImportError:
    inflating = zlib  # type: ignore[misc]

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP = 31  # zlib's window bits: gzip's header and checksum, and nothing else
_PACKED_BYTES = 2**18
# Long names and attributes need some. tarfile reads a header of any stated length into memory, and
# before 3.11.10 the time to read it grows with the square.
_MAX_TAR_HEADER_BYTES = 2**14
# zipfile takes the whole directory into memory; an entry has about 150 bytes there.
_MAX_ZIP_READ_BYTES = 2**25
_TAR_END = bytes(tarfile.BLOCKSIZE)
_ZIP_LOCAL_HEADER_BYTES = 30
_ZIP_DIRECTORY_ENTRY = b"PK\1\2"
_INFLATING_ERROR = cast("type[Exception]", inflating.error)  # zlib has one of its own
# errors that the two libraries let through when an archive is broken
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    _INFLATING_ERROR,
    struct.error,
    EOFError,
    ValueError,
    ArithmeticError,
    LookupError,
    NotImplementedError,
)
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_STDIN = 0
_STDOUT = 1
# Where all want the CPU the unpacking process gets a third of what one of the usual priority gets,
# so three large archives weigh as much as one such process. Less made nobody's wait shorter.
_NICE = 5


class Gunzip(io.RawIOBase):
    """Unpacks `file` as it is read. Raises inflating.error if damaged, EOFError if incomplete.

    The gzip module of Python 3.11 reads 8 KiB at a time, which cost 2.7 times as much CPU time for
    weights, which hardly compress.
    """

    def __init__(self, file: IO[bytes]) -> None:
        """Read a gzip from its start."""
        super().__init__()
        self._file = file
        self._member = inflating.decompressobj(_GZIP)
        self._ahead = b""

    def readable(self) -> bool:
        """Return True, as io.RawIOBase asks."""
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Unpack into the buffer; return how many bytes there were, 0 at the end of the file."""
        target = memoryview(buffer).cast("B")
        while not self._member.eof or self._begin_next():
            packed = self._member.unconsumed_tail or self._ahead or self._file.read(_PACKED_BYTES)
            self._ahead = b""
            piece = self._member.decompress(packed, len(target))
            if piece:
                target[: len(piece)] = piece
                return len(piece)
            if not packed and not self._member.eof:
                raise EOFError("it ends before its last piece does")
        return 0

    def _begin_next(self) -> bool:
        """Begin the next member: a file may have several, with zeros between and after them.
        Return whether there is one.
        """
        rest = self._member.unused_data
        while not (rest := rest.lstrip(b"\0")):
            if not (rest := self._file.read(_PACKED_BYTES)):
                return False
        self._ahead = rest
        self._member = inflating.decompressobj(_GZIP)
        return True


class _Rejoined(io.RawIOBase):
    """Reads a stream whose first bytes were read already."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        """Begin with `head`, and go on with the stream."""
        super().__init__()
        self._head = head
        self._stream = stream

    def readable(self) -> bool:
        """Return that it can be read, as io asks."""
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Read into the buffer, as io asks."""
        target = memoryview(buffer).cast("B")
        data = self._head[: len(target)] or self._stream.read(len(target))
        self._head = self._head[len(data) :]
        target[: len(data)] = data
        return len(data)


def unpack(
    archive: Path,
    target: Path,
    limits: Limits,
    *,
    content: Path | None = None,
    room: Callable[[int, int], None] | None = None,
) -> None:
    """Make the folder `target` with what the archive holds; on any error nothing of it is left.

    `content` is where its bytes are read, when that is not the path that messages name.
    Modification times are kept, those of a zip taken as UTC: learned sizes are found by them.
    InvalidModel names archive, entry and reason; BackendError is the disk's fault, also when the
    last GiB of it, or its last inodes, would be needed. `room` is as for Unpacking.
    """
    try:
        content = content or archive
        kind = kind_of(archive, content)
        packed_bytes = content.stat().st_size
        with _new_folder(target):
            _fill(content, kind, Unpacking(archive, packed_bytes, target, limits, room))
    except OSError as error:
        reason = error.strerror or error
        raise BackendError(f"cannot unpack {shown(archive)}: {reason}") from error


def unpack_stream(
    archive: Path,  # the name alone
    stream: IO[bytes],
    packed_bytes: int,  # by the word of its sender
    target: Path,
    limits: Limits,
    *,
    room: Callable[[int, int], None] | None = None,
) -> None:
    """Unpack a tar or tar.gz as `unpack` does, while its bytes arrive."""
    try:
        head = _read_head(stream)
        kind = kind_by_head(archive, head)
        with _new_folder(target):
            unpacking = Unpacking(archive, packed_bytes, target, limits, room)
            _fill_from_tar(_Rejoined(head, stream), kind, unpacking)
    except OSError as error:
        reason = error.strerror or error
        raise BackendError(f"cannot unpack {shown(archive)}: {reason}") from error


def _read_head(stream: IO[bytes]) -> bytes:
    """Return the first bytes of a stream, which may come one by one."""
    head = b""
    while len(head) < HEAD_BYTES:
        more = stream.read(HEAD_BYTES - len(head))
        if not more:
            break
        head += more
    return head


@contextmanager
def _new_folder(target: Path) -> Iterator[None]:
    """Make the folder; on any error nothing of it is left."""
    target.mkdir()
    try:
        yield
    except BaseException:
        shutil.rmtree(target)
        raise


def _fill(content: Path, kind: str, unpacking: Unpacking) -> None:
    """Unpack the archive at `content`, of a kind of archive_kinds.kind_of. Raise InvalidModel if it
    is damaged.
    """
    if kind != "zip":
        with content.open("rb", buffering=0) as file:
            _fill_from_tar(file, kind, unpacking)
        return
    try:
        _read_zip(content, unpacking)
    except _DAMAGED as error:
        raise unpacking.make_error(f"the archive is damaged: {error}") from error
    unpacking.finish()


def _fill_from_tar(file: io.RawIOBase, kind: str, unpacking: Unpacking) -> None:
    """Unpack a tar or tar.gz that is read once, forwards. Raise InvalidModel if it is damaged."""
    try:
        raw = Gunzip(cast("IO[bytes]", file)) if kind == "tar.gz" else file
        with io.BufferedReader(raw, CHUNK) as stream:
            _read_tar(stream, unpacking)
    except _DAMAGED as error:
        raise unpacking.make_error(f"the archive is damaged: {error}") from error
    unpacking.finish()


class _TarBytes:
    """A tar for tarfile to read: forwards only, and no more at a time than was allowed.

    tarfile takes a header of any length into memory, follows a negative size back into an endless
    loop, and takes a damaged header for the end; `ended` says whether the end was really there.
    """

    def __init__(self, stream: IO[bytes], unpacking: Unpacking) -> None:
        """Begin at the start of a tar. Nothing can be read until `allow` is called."""
        self._stream = stream
        self._unpacking = unpacking
        self._allowed = 0
        self._position = 0
        self._last = b""

    @property
    def ended(self) -> bool:
        """Return whether the last block that was read is that which ends a tar."""
        return self._last == _TAR_END

    def allow(self, size: int) -> None:
        """Allow the following reads so many bytes together."""
        self._allowed = size

    def tell(self) -> int:
        """Return how many bytes were read so far."""
        return self._position

    def seek(self, position: int) -> None:
        """Read up to a position ahead. Raise InvalidModel for one behind, or beyond what is
        allowed.
        """
        self.read(position - self._position)

    def read(self, size: int) -> bytes:
        """Read so many bytes. Raise InvalidModel if they are more than is allowed."""
        if not 0 <= size <= self._allowed:
            raise self._unpacking.make_error("the archive is damaged: the next header is too long")
        self._allowed -= size
        self._last = self._stream.read(size)
        self._position += len(self._last)
        return self._last


def _read_tar(stream: IO[bytes], unpacking: Unpacking) -> None:
    """Unpack a tar to its end, and read what follows it. Raise InvalidModel if it breaks off."""
    reader = _TarBytes(stream, unpacking)
    reader.allow(_MAX_TAR_HEADER_BYTES)
    source = cast("IO[bytes]", reader)
    entries = 0
    with tarfile.TarFile(fileobj=source, encoding="utf-8", errors="surrogateescape") as packed:
        while member := packed.next():
            # tarfile would keep every header that it has read, of up to 16 KiB each
            packed.members.clear()  # type: ignore[attr-defined]
            unpacking.begin(member.name)
            entries += 1
            unpacking.expect(entries)  # a folder may come any number of times
            reader.allow(member.size)
            _add_tar_member(packed, member, unpacking)
            reader.allow(_MAX_TAR_HEADER_BYTES)
    if not reader.ended:
        raise unpacking.make_error("the archive is damaged: after this entry it breaks off")
    while chunk := stream.read(CHUNK):  # the checksum of a gzip comes last
        unpacking.spend(len(chunk))


def _add_tar_member(packed: tarfile.TarFile, member: tarfile.TarInfo, to: Unpacking) -> None:
    """Unpack one entry of a tar. Raise InvalidModel for one that is no file, folder or link."""
    if member.isdir():
        to.add_folder(member.mtime)
    elif member.issym():
        to.add_link(member.linkname)
    elif member.islnk():
        to.add_hard_link(member.linkname)
    elif member.issparse():
        raise to.make_error("sparse files are not supported")
    elif (source := packed.extractfile(member)) is None or not member.isreg():
        raise to.make_error("it is neither a file, a folder nor a link")
    else:
        to.add_file(source, size=member.size, mode=member.mode, mtime=member.mtime)


class _ZipFile(io.BufferedReader):
    """A zip for zipfile to read, which takes the whole directory in one read.

    Its entries are counted there, by their signatures: zipfile takes seconds to make objects of
    some hundred thousand, and how many the archive itself says there are is not to be believed.
    """

    def __init__(self, archive: Path, unpacking: Unpacking) -> None:
        """Open the zip; `unpacking` refuses it if it has too many entries."""
        super().__init__(io.FileIO(archive))
        self._unpacking = unpacking

    def read(self, size: int | None = -1, /) -> bytes:
        """Read so many bytes, and count the entries in them if they are the zip's directory. Raise
        BadZipFile or InvalidModel if it is too large.
        """
        if size is not None and size > _MAX_ZIP_READ_BYTES:
            raise zipfile.BadZipFile("its directory is too long")
        data = super().read(size)
        if data.startswith(_ZIP_DIRECTORY_ENTRY):
            self._unpacking.expect(data.count(_ZIP_DIRECTORY_ENTRY))
        return data


def _read_zip(archive: Path, unpacking: Unpacking) -> None:
    """Unpack a zip, after its directory was checked and room requested for all its entries."""
    with _ZipFile(archive, unpacking) as file, zipfile.ZipFile(file) as packed:
        infos = packed.infolist()
        _check_places(infos, archive.stat().st_size, unpacking)
        unpacking.foresee([info.file_size for info in infos])
        # some archivers of Windows part the names by backslashes, and then by nothing else
        has_slashes = any("/" in info.orig_filename for info in infos)
        for info in infos:
            name = info.orig_filename
            name = name if has_slashes else name.replace("\\", "/")
            unpacking.begin(name)
            _add_zip_member(packed, info, name, unpacking)


def _check_places(infos: list[zipfile.ZipInfo], size: int, unpacking: Unpacking) -> None:
    """Raise InvalidModel if entries share packed bytes, as the densest bombs do, or if one ends
    behind the archive's end.
    """
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        unpacking.begin(info.orig_filename)
        if info.header_offset < end:
            raise unpacking.make_error("it overlaps another entry")
        end = info.header_offset + _ZIP_LOCAL_HEADER_BYTES + len(info.orig_filename)
        end += info.compress_size
        if end > size:
            raise unpacking.make_error("the archive is damaged: it ends before this entry does")


def _add_zip_member(
    packed: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, to: Unpacking
) -> None:
    """Unpack one entry of a zip under the name. Raise InvalidModel for one that is encrypted,
    packed by another method than zip's usual two, or no file, folder or link.
    """
    mode = info.external_attr >> 16
    kind = stat.S_IFMT(mode)
    if info.flag_bits & 1:
        raise to.make_error("it is encrypted")
    if info.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise to.make_error("it is packed by another method than stored and deflated")
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}:
        raise to.make_error("it is neither a file, a folder nor a link")
    if kind == stat.S_IFDIR or name.endswith("/"):
        to.add_folder(_zip_time(info))
        return
    with packed.open(info) as source:
        if kind == stat.S_IFLNK:
            to.add_link(os.fsdecode(source.read(MAX_NAME_BYTES + 1)))
        else:
            to.add_file(source, size=info.file_size, mode=mode, mtime=_zip_time(info))


def _zip_time(info: zipfile.ZipInfo) -> float:
    """Return when an entry was changed, in seconds since 1970; 0 where its packer left that out."""
    year, month, day, *time = info.date_time
    try:
        midnight = datetime(year, month, day, tzinfo=UTC).timestamp()
    except ValueError:
        return 0
    # hours, minutes and seconds may be out of their range, which datetime refuses
    return midnight + 3600 * time[0] + 60 * time[1] + time[2]


def main() -> None:
    """Unpack one archive in a process of its own.

    Arguments: the adapter's pid, with which this process ends, and a job as JSON: `archive`,
    `target` and `content` of `unpack`, `limits`, and whether room `is_reserved` for it. stdout is a
    socket: an error is written to it as a line of JSON, and so are each time the bytes and inodes
    to reserve, which a byte answers. Without `content` so many `packed_bytes` come from stdin.
    """
    parent = int(sys.argv[1])
    job = json.loads(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the adapter ended before prctl was called
        return
    _give_way()
    archive = Path(job["archive"])
    target = Path(job["target"])
    limits = Limits(**job["limits"])
    room = _reserve if job["is_reserved"] else None
    try:
        if job["content"] is None:
            with open(_STDIN, "rb", buffering=0) as stream:
                unpack_stream(archive, stream, job["packed_bytes"], target, limits, room=room)
            return
        unpack(archive, target, limits, content=Path(job["content"]), room=room)
    except AdapterError as error:
        _send({"error": type(error).__name__, "text": str(error)})


def _reserve(count: int, inodes: int) -> None:
    """Wait until the adapter has reserved so much room on disk. End this process if it refuses."""
    _send({"room": count, "inodes": inodes})
    if not os.read(_STDOUT, 1):
        sys.exit(1)


def _send(message: dict[str, object]) -> None:
    """Send a message to the adapter, as one line of JSON."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _give_way() -> None:
    """Lower the priority, after the start, which is short."""
    with suppress(OSError):
        os.nice(_NICE)
