"""Archives of entries that no packer would write."""

import io
import stat
import tarfile
import zipfile

from adapter.packages.unpack import Limits

TIME = 1_600_000_000  # even: zips keep two seconds
LIMITS = Limits()


def entry(name, data=b"", *, kind=tarfile.REGTYPE, to="", mode=0o644, **more):
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode, member.mtime = kind, to, mode, TIME
    member.size = len(data)
    for key, value in more.items():
        setattr(member, key, value)
    return member, data


def link(name, to):
    return entry(name, kind=tarfile.SYMTYPE, to=to)


def hard(name, to):
    return entry(name, kind=tarfile.LNKTYPE, to=to)


def folder(name, **more):
    return entry(name, kind=tarfile.DIRTYPE, **more)


def tar_bytes(*entries, layout=tarfile.PAX_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=layout) as packed:
        for member, data in entries:
            packed.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def zip_entry(name, data=b"", mode=stat.S_IFREG | 0o644, **more):
    info = zipfile.ZipInfo(name, (2020, 9, 13, 12, 26, 40))
    info.create_system, info.external_attr = 3, mode << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def zip_bytes(*entries):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for info, data in entries:
            packed.writestr(info, data)
    return buffer.getvalue()


def write(path, data):
    path.write_bytes(data)
    return path


def contents(root):
    return {
        str(path.relative_to(root)): path.readlink().as_posix()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in root.rglob("*")
    }


GOOD = [
    folder("./"),
    folder("top"),
    folder("./top/"),
    entry("top/config.pbtxt", b"config"),
    entry("top/1/model.py", b"weights" * 100_000, mode=0o4777),
    entry("top/ü", b""),
    link("top/latest", "1"),
    link("top/up", "1/../config.pbtxt"),
    link("top/through", "latest/model.py"),
    link("top/1/dangling", "../gone"),
    hard("top/same", "./top/config.pbtxt"),
    folder("./"),
]
