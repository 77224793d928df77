"""The models of the endpoint's soak: those that answer, those that die, and hostile archives.

A good model has its contents in two files, and answers with what it finds in both: an answer of
mixed contents has different numbers in them, and one of garbled bytes another sum.
"""

import gzip
import io
import random
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from tests.trees import CONFIG, write_python_model

MODEL_BYTES = 40 * 2**20  # declared, of each model
_DECLARED = f'parameters {{ key: "memory_bytes" value {{ string_value: "{MODEL_BYTES}" }} }}\n'
_LARGE_BYTES = 33 * 2**20  # comes in parts
_SMALL_BYTES = 1_500_000

_INITIALIZE = """\
import pathlib, zlib
folder = pathlib.Path(args["model_repository"], args["model_version"])
weights = (folder / "weights.bin").read_bytes()
self.contents = int(weights[:10])
self.sum = zlib.crc32(weights) % 2**20
"""
_ANSWER = """\
import numpy
first = values[0] * (CONTENTS % 7 + 1)
values = numpy.array([first, NUMBER, CONTENTS, self.contents, self.sum], numpy.float32)
"""


def key_of(number: int) -> str:
    """Return the key of a good model; its form depends on the number."""
    if number == 5:
        return "large/model-5.tar"
    ending = [".tar.gz", "", ".tar.gz", ".zip"][number % 4]
    return f"team-{number % 3}/model-{number}{ending}"


def weights_of(number: int, contents: int) -> bytes:
    """Return the larger one of the files; it does not compress."""
    size = _LARGE_BYTES if number == 5 else _SMALL_BYTES
    return b"%010d" % contents + random.Random(f"{number} {contents}").randbytes(size)


def right_answer(number: int, contents: int, value: float) -> list[float]:
    """Return what the model answers with these contents."""
    weights_sum = zlib.crc32(weights_of(number, contents)) % 2**20
    return [value * (contents % 7 + 1), number, contents, contents, weights_sum]


def good_model(number: int, contents: int, scratch: Path) -> dict[str, bytes]:
    """Return the objects of the model in a bucket."""
    answer = _ANSWER.replace("CONTENTS", str(contents)).replace("NUMBER", str(number))
    folder = write_python_model(
        scratch / f"{number}-{contents}",
        initialize=_INITIALIZE,
        answer=answer,
        config=CONFIG + _DECLARED,
    )
    (folder / "1" / "weights.bin").write_bytes(weights_of(number, contents))
    return pack(key_of(number), folder)


def pack(key: str, folder: Path) -> dict[str, bytes]:
    """Return the folder as the objects of a model of this key."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in files]
    packed = io.BytesIO()
    if key.endswith(".zip"):
        with zipfile.ZipFile(packed, "w") as archive:
            for path, name in zip(files, names, strict=True):
                archive.write(path, name)
    elif key.endswith((".tar", ".tar.gz")):
        mode = "w:gz" if key.endswith(".gz") else "w:"
        with tarfile.open(fileobj=packed, mode=mode) as tar:
            tar.add(folder, ".")
    else:
        return {f"{key}/{name}": path.read_bytes() for path, name in zip(files, names, strict=True)}
    return {key: packed.getvalue()}


_DYING = {
    "raises-in-initialize": {"initialize": "raise RuntimeError('no such GPU')"},
    "exits-in-initialize": {"initialize": "import os; os._exit(3)"},
    "raises-in-execute": {"answer": "raise RuntimeError('cannot divide')"},
    "exits-in-execute": {"answer": "import os; os._exit(3)"},
    "is-killed-in-execute": {"answer": "import os; os.kill(os.getpid(), 9)"},
}
DYING = [f"dying/{name}.tar.gz" for name in _DYING]


def dying_model(key: str, scratch: Path) -> dict[str, bytes]:
    """Return the objects of a model that fails, each time."""
    name = key.removeprefix("dying/").removesuffix(".tar.gz")
    folder = write_python_model(scratch / name, config=CONFIG + _DECLARED, **_DYING[name])
    return pack(key, folder)


# -- hostile archives -----------------------------------------------------------------------

MARK = "escaped-from-the-archive"  # in the name of whatever must not appear outside


def _tar(entries: list[tuple[tarfile.TarInfo, bytes]], *, is_zipped: bool = True) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz" if is_zipped else "w:") as tar:
        for entry, content in entries:
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _file(name: str, content: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), content


def _special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.linkname = target
    return entry, b""


def _model_and(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return an archive of a model that could be served but for these entries."""
    return _tar([_file("config.pbtxt", CONFIG.encode()), _file("1/model.py", b"pass"), *entries])


def _bomb() -> bytes:
    """Return 12 MB that are 12 GiB, two members of gzip after the other."""
    packed = io.BytesIO()
    entry = tarfile.TarInfo("1/zeros.bin")
    entry.size = 3 * 2**30
    block = gzip.compress(bytes(2**26), 9)
    packed.write(gzip.compress(entry.tobuf()))
    for _ in range(entry.size // 2**26):
        packed.write(block)
    return packed.getvalue()


def _nested(depth: int) -> bytes:
    return _model_and(_file("/".join(["a"] * depth) + f"/{MARK}"))


def _nested_archive() -> bytes:
    inner = _tar([_file(f"../../{MARK}")])
    return _tar([_file("a.tar.gz", _tar([_file("a.tar.gz", inner)]))])


def _zip(*names: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("config.pbtxt", *names):
            archive.writestr(name, b"x")
    return packed.getvalue()


def _overlapping_zip() -> bytes:
    """Return a zip whose second entry has the bytes of the first."""
    packed = bytearray(_zip("1/one", "1/two"))
    central = packed.index(b"PK\1\2")
    second = packed.index(b"PK\1\2", central + 4)
    packed[second + 42 : second + 46] = packed[central + 42 : central + 46]
    return bytes(packed)


# By key below `hostile/`: what makes the archive; `outside` is an absolute path that must not come.
HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "parent.tar.gz": lambda _: _model_and(_file(f"../../../../{MARK}")),
    "parent.tar": lambda _: _tar([_file(f"1/../../../{MARK}")], is_zipped=False),
    "absolute.tar.gz": lambda outside: _model_and(_file(str(outside))),
    "link-out.tar.gz": lambda outside: _model_and(_special("1/w", tarfile.SYMTYPE, str(outside))),
    "link-to-passwd.tar.gz": lambda _: _model_and(_special("1/w", tarfile.SYMTYPE, "/etc/passwd")),
    "through-a-link.tar.gz": lambda outside: _model_and(
        _special("1/out", tarfile.SYMTYPE, str(outside.parent)), _file(f"1/out/{MARK}")
    ),
    "chain-of-links.tar.gz": lambda _: _model_and(
        _special("1/a", tarfile.SYMTYPE, ".."),
        _special("1/b", tarfile.SYMTYPE, "a/.."),
        _file(f"1/b/{MARK}"),
    ),
    "hard-link-out.tar.gz": lambda _: _model_and(_special("1/w", tarfile.LNKTYPE, "/etc/passwd")),
    "device.tar.gz": lambda _: _model_and(_special("1/w", tarfile.CHRTYPE)),
    "pipe.tar.gz": lambda _: _model_and(_special("1/w", tarfile.FIFOTYPE)),
    "twice.tar.gz": lambda _: _model_and(_file("1/model.py", b"other")),
    "truncated.tar.gz": lambda _: _model_and(_file("1/w", bytes(10**6)))[:-500],
    "garbage-behind.tar.gz": lambda _: gzip.compress(b"no tar at all" * 1000),
    "no-archive.tar.gz": lambda _: b"this is no archive",
    "empty.tar.gz": lambda _: b"",
    "deep.tar.gz": lambda _: _nested(3000),
    "deep-enough.tar.gz": lambda _: _nested(70),
    "long-name.tar.gz": lambda _: _model_and(_file("1/" + "n" * 5000)),
    "archives-in-it.tar.gz": lambda _: _nested_archive(),
    "bomb.tar.gz": lambda _: _bomb(),
    "parent.zip": lambda _: _zip(f"../../../{MARK}"),
    "absolute.zip": lambda outside: _zip(str(outside)),
    "overlapping.zip": lambda _: _overlapping_zip(),
    "truncated.zip": lambda _: _zip("1/model.py")[:-30],
}
