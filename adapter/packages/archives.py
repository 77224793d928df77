"""Unpacks the archive of a model package, and trusts nothing that it says.

An archive may come from anybody who may name a model. tarfile and zipfile only read it; what may
be written is for unpacking.py to say, since what the `filter` of tarfile refuses differs from one
Python to the next. Reads and writes the disk, so callers run it in a thread or a process. `main` is
that process: it imports nothing outside the standard library but the modules that unpack, as
imports are most of its start.
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
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from adapter.errors import AdapterError, BackendError, InvalidModel
from adapter.packages.faults import shown
from adapter.packages.unpacking import CHUNK, MAX_NAME_BYTES, Limits, Unpacking

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP = 31  # zlib's window bits: gzip's header and checksum, and nothing else
_PACKED_BYTES = 2**18
_FEW = 16  # entries, hidden ones included, among which a lone archive is sought
# Long names and attributes need some. tarfile reads a header of any stated length into memory, and
# before 3.11.10 the time to read it grows with the square.
_MAX_TAR_HEADER_BYTES = 2**14
# zipfile takes the whole directory into memory; an entry has about 150 bytes there.
_MAX_ZIP_READ_BYTES = 2**25
_TAR_END = bytes(tarfile.BLOCKSIZE)
_ZIP_LOCAL_HEADER_BYTES = 30
_GZIP_LENGTH_BYTES = 4
_ZIP_DIRECTORY_ENTRY = b"PK\1\2"
_OTHER_PACKINGS = {
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
}
# errors that the two libraries let through when an archive is broken
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
    ArithmeticError,
    LookupError,
    NotImplementedError,
)
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_STDOUT = 1
# Where all want the CPU the unpacking process gets a third of what one of the usual priority gets,
# so three large archives weigh as much as one such process. Less made nobody's wait shorter.
_NICE = 5


class Gunzip(io.RawIOBase):
    """Unpacks `file` as it is read. Raises zlib.error if damaged, EOFError if incomplete.

    The gzip module of Python 3.11 reads 8 KiB at a time, which cost 2.7 times as much CPU time for
    weights, which hardly compress.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._member = zlib.decompressobj(_GZIP)
        self._ahead = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
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
        """Begin the next member: a file may have several, with zeros between and after them."""
        rest = self._member.unused_data
        while not (rest := rest.lstrip(b"\0")):
            if not (rest := self._file.read(_PACKED_BYTES)):
                return False
        self._ahead, self._member = rest, zlib.decompressobj(_GZIP)
        return True


def is_archive(path: Path) -> bool:
    """Return whether `unpack` takes the file, by its name or, for tar and gzip, by its first bytes.

    A zip is known by its name alone: model files of PyTorch and Keras are zips as well.
    """
    if not path.is_file():
        return False  # SageMaker's names of models, thus of folders, end in .tar.gz
    return _kind_by_name(path) is not None or _kind_by_bytes(path) in {"tar", "tar.gz"}


def is_packed(name: str) -> bool:
    """Return whether a file of this name is an archive that `unpack` may take."""
    return _kind_by_name(Path(name)) is not None


def archive_at(path: Path) -> Path | None:
    """Return the archive itself, or the only one in the folder; None if there is none."""
    if not path.is_dir():
        return path if is_archive(path) else None
    with os.scandir(path) as entries:
        visible = [e for e in islice(entries, _FEW) if not e.name.startswith(".")]
    alone = Path(visible[0].path) if len(visible) == 1 else None
    return alone if alone is not None and not alone.is_symlink() and is_archive(alone) else None


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
        kind = _kind(archive, content)
        target.mkdir()
        try:
            _fill(content, kind, Unpacking(archive, target, limits, room))
        except BaseException:
            shutil.rmtree(target)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise BackendError(f"cannot unpack {shown(archive)}: {reason}") from error


def least_bytes(archive: Path, beyond: int) -> int:
    """Return how many bytes come out of a gzipped tar at least, if these are more than `beyond`;
    else 0, as for all other files.

    Its last four bytes say how long it is, or its last part, modulo 2**32: where that is enough, it
    is read so far, and nothing written. Half is left to headers, which become nothing on disk.
    """
    if _kind_by_bytes(archive) != "tar.gz":
        return 0
    length = stated_bytes(archive)
    with archive.open("rb", buffering=0) as file:
        stream, seen = Gunzip(file), 0
        try:
            while seen // 2 <= beyond < length // 2 and (chunk := stream.read(CHUNK)):
                seen += len(chunk)
        except (zlib.error, EOFError):
            return 0  # reported when it is unpacked
    return seen // 2 if seen // 2 > beyond else 0


def stated_bytes(archive: Path) -> int:
    """Return how many bytes come out of a tar by its own word, which may be wrong; 0 of a zip."""
    kind = _kind_by_bytes(archive)
    with archive.open("rb", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if kind != "tar.gz" or size < _GZIP_LENGTH_BYTES:
            return size if kind == "tar" else 0
        file.seek(-_GZIP_LENGTH_BYTES, os.SEEK_END)
        (length,) = struct.unpack("<I", file.read(_GZIP_LENGTH_BYTES))
        return int(length)


def _kind(archive: Path, content: Path) -> str:
    named, found = _kind_by_name(archive), _kind_by_bytes(content)
    if found is None or named not in {None, found}:
        raise InvalidModel(f"{shown(archive)}: {_odd_bytes(content, named, found)}")
    return found


def _odd_bytes(content: Path, named: str | None, found: str | None) -> str:
    """Return what is wrong with an archive by its first bytes."""
    if not content.stat().st_size:
        return "it is empty"
    if (packing := _other_packing(content)) is not None:
        advice = f"pack it as {named or 'tar.gz'}"
        return f"its first bytes are those of {packing}, which is not unpacked: {advice}"
    expected = f", not those of a {named}" if named else ""
    return f"its first bytes are those of {found or 'no archive'}{expected}"


def _other_packing(content: Path) -> str | None:
    """Return the name of a packing that is common, and that `unpack` does not read."""
    with content.open("rb") as file:
        head = file.read(max(map(len, _OTHER_PACKINGS)))
    return next((name for magic, name in _OTHER_PACKINGS.items() if head.startswith(magic)), None)


def _kind_by_name(path: Path) -> str | None:
    name = path.name.lower()
    if name.endswith((".tar.gz", ".tgz")):
        return "tar.gz"
    return next((kind for kind in ("tar", "zip") if name.endswith("." + kind)), None)


def _kind_by_bytes(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(tarfile.BLOCKSIZE)
    if head.startswith(b"\x1f\x8b"):
        return "tar.gz"
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return "zip"
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return "tar"


def _fill(content: Path, kind: str, unpacking: Unpacking) -> None:
    try:
        if kind == "zip":
            _read_zip(content, unpacking)
        else:
            with content.open("rb", buffering=0) as file:
                raw = Gunzip(file) if kind == "tar.gz" else file
                with io.BufferedReader(raw, CHUNK) as stream:
                    _read_tar(stream, unpacking)
    except _DAMAGED as error:
        raise unpacking.refused(f"the archive is damaged: {error}") from error
    unpacking.finish()


class _TarBytes:
    """A tar for tarfile to read: forwards only, and no more at a time than was allowed.

    tarfile takes a header of any length into memory, follows a negative size back into an endless
    loop, and takes a damaged header for the end; `ended` says whether the end was really there.
    """

    def __init__(self, stream: IO[bytes], unpacking: Unpacking) -> None:
        self._stream = stream
        self._unpacking = unpacking
        self._allowed = 0
        self._position = 0
        self._last = b""

    @property
    def ended(self) -> bool:
        return self._last == _TAR_END

    def allow(self, size: int) -> None:
        self._allowed = size

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self.read(position - self._position)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._allowed:
            raise self._unpacking.refused("the archive is damaged: the next header is too long")
        self._allowed -= size
        self._last = self._stream.read(size)
        self._position += len(self._last)
        return self._last


def _read_tar(stream: IO[bytes], unpacking: Unpacking) -> None:
    reader = _TarBytes(stream, unpacking)
    reader.allow(_MAX_TAR_HEADER_BYTES)
    source = cast("IO[bytes]", reader)
    with tarfile.TarFile(fileobj=source, encoding="utf-8", errors="surrogateescape") as packed:
        while member := packed.next():
            unpacking.begin(member.name)
            reader.allow(member.size)
            _add_tar_member(packed, member, unpacking)
            reader.allow(_MAX_TAR_HEADER_BYTES)
    if not reader.ended:
        raise unpacking.refused("the archive is damaged: after this entry it breaks off")
    while chunk := stream.read(CHUNK):  # the checksum of a gzip comes last
        unpacking.spend(len(chunk))


def _add_tar_member(packed: tarfile.TarFile, member: tarfile.TarInfo, to: Unpacking) -> None:
    if member.isdir():
        to.add_folder(member.mtime)
    elif member.issym():
        to.add_link(member.linkname)
    elif member.islnk():
        to.add_hard_link(member.linkname)
    elif member.issparse():
        raise to.refused("sparse files are not supported")
    elif (source := packed.extractfile(member)) is None or not member.isreg():
        raise to.refused("it is neither a file, a folder nor a link")
    else:
        to.add_file(source, size=member.size, mode=member.mode, mtime=member.mtime)


class _ZipFile(io.BufferedReader):
    """A zip for zipfile to read, which takes the whole directory in one read.

    Its entries are counted there, by their signatures: zipfile takes seconds to make objects of
    some hundred thousand, and how many the archive itself says there are is not to be believed.
    """

    def __init__(self, archive: Path, unpacking: Unpacking) -> None:
        super().__init__(io.FileIO(archive))
        self._unpacking = unpacking

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_ZIP_READ_BYTES:
            raise zipfile.BadZipFile("its directory is too long")
        data = super().read(size)
        if data.startswith(_ZIP_DIRECTORY_ENTRY):
            self._unpacking.expect(data.count(_ZIP_DIRECTORY_ENTRY))
        return data


def _read_zip(archive: Path, unpacking: Unpacking) -> None:
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
    """Refuse entries that share their packed bytes: they make the densest bombs."""
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        unpacking.begin(info.orig_filename)
        if info.header_offset < end:
            raise unpacking.refused("it overlaps another entry")
        end = info.header_offset + _ZIP_LOCAL_HEADER_BYTES + len(info.orig_filename)
        end += info.compress_size
        if end > size:
            raise unpacking.refused("the archive is damaged: it ends before this entry does")


def _add_zip_member(
    packed: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, to: Unpacking
) -> None:
    mode = info.external_attr >> 16
    kind = stat.S_IFMT(mode)
    if info.flag_bits & 1:
        raise to.refused("it is encrypted")
    if info.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise to.refused("it is packed by another method than stored and deflated")
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}:
        raise to.refused("it is neither a file, a folder nor a link")
    if kind == stat.S_IFDIR or name.endswith("/"):
        to.add_folder(_zip_time(info))
        return
    with packed.open(info) as source:
        if kind == stat.S_IFLNK:
            to.add_link(os.fsdecode(source.read(MAX_NAME_BYTES + 1)))
        else:
            to.add_file(source, size=info.file_size, mode=mode, mtime=_zip_time(info))


def _zip_time(info: zipfile.ZipInfo) -> float:
    """Some packers leave it out; then the month is 0."""
    year, month, day, *time = info.date_time
    try:
        midnight = datetime(year, month, day, tzinfo=UTC).timestamp()
    except ValueError:
        return 0
    return midnight + 3600 * time[0] + 60 * time[1] + time[2]  # these may be out of their range


def main() -> None:
    """Unpack one archive in a process of its own.

    Arguments: the adapter's pid, with which this process ends, and a job as JSON: `archive`,
    `target` and `content` of `unpack`, `limits`, and whether it `reserves` room. stdout is a
    socket: an error is written to it as a line of JSON, and so are the bytes and inodes to
    reserve, which a byte answers.
    """
    parent, job = int(sys.argv[1]), json.loads(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        return
    _give_way()
    archive, target, content = (Path(job[key]) for key in ("archive", "target", "content"))
    try:
        room = _reserve if job["reserves"] else None
        unpack(archive, target, Limits(**job["limits"]), content=content, room=room)
    except AdapterError as error:
        _send({"error": type(error).__name__, "text": str(error)})


def _reserve(count: int, inodes: int) -> None:
    """Wait until the adapter has room on disk for so much; it ends this process if not."""
    _send({"room": count, "inodes": inodes})
    if not os.read(_STDOUT, 1):
        sys.exit(1)


def _send(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _give_way() -> None:
    """Lower the priority, after the start, which is short. With autogroups (sched(7)) it counts
    within a session only, so that of the session is lowered as well; not every Linux has them.
    """
    with suppress(OSError):
        os.nice(_NICE)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(f"{_NICE}")
