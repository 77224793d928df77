"""Values that name and describe a model. Immutable; validated where they are created.

Triton pastes model names into paths, shared-memory keys and, before 25.08, a shell command; from
26.03 on it refuses `/` and `..` (docs/design/triton.md, Names). So only a safe path segment is used
as it is, in Triton, on disk and in the logs of the stubs; every other id gets a private name made
of safe characters alone:

    fraud-v2.tar.gz    fraud-v2.tar.gz
    team/a b           ta.u.team_2fa_20b         each other byte as _hh
    (longer than 200)  ta.h.<sha256 of the id>
    (name is taken)    ta.r.<n>.<sha256 of the id>
    (response cache)   ta.c.<random>.<sha256 of the id>
    (part of package)  ta.p.<hash of the entry's name>.<own name, each other byte as _hh>
"""

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from adapter.core.memory import NO_BYTES, Bytes
from adapter.core.tensors import ContentTypes
from adapter.errors import InvalidRequest

# The caller's opaque name of a model: any UTF-8 text.
ModelId = NewType("ModelId", str)

# The name that Triton knows it by: one safe path segment.
TritonName = NewType("TritonName", str)

MAX_MODEL_ID_BYTES = 1024
_UNPRINTABLE = re.compile("[\x00\ud800-\udfff]")

_PRIVATE = "ta."
_ESCAPED = "ta.u."
_HASHED = "ta.h."
_NUMBERED = "ta.r."
_FRESH = "ta.c."
_FRESH_BYTES = 8
_PART = "ta.p."
_MAX_NAME_BYTES = 200
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The private name of a part. The number of an instance may stand behind it, as in `step_0_12`. That
# is no escape: a `_` with one digit, or with the two of a control character.
_PRIVATE_NAME = re.compile(
    r"ta\.p\.[0-9a-f]{16}\.(?P<own>(?:[A-Za-z0-9-]|_[2-7][0-9a-f]|_[89a-f][0-9a-f])*)"
    r"(?P<hashed>_h)?"
)
_ESCAPE = re.compile(rb"_([0-9a-f]{2})")
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies a process: `started`, in clock ticks since boot, tells it from a later process
    with the same pid.
    """

    pid: int
    started: int


def parse_model_id(text: str) -> ModelId:
    """Return `text` as a ModelId; refuse only what cannot be a name at all."""
    if not text:
        raise InvalidRequest("model_name is empty")
    if _UNPRINTABLE.search(text):
        raise InvalidRequest("model_name holds a NUL or is not valid UTF-8")
    if (size := len(text.encode())) > MAX_MODEL_ID_BYTES:
        raise InvalidRequest(
            f"model_name is {size} bytes long; at most {MAX_MODEL_ID_BYTES} are accepted"
        )
    return ModelId(text)


def is_safe_name(model_id: str) -> bool:
    """Return whether Triton may have the model under the caller's own name for it."""
    return (
        len(model_id) <= _MAX_NAME_BYTES
        and _SAFE.fullmatch(model_id) is not None
        and ".." not in model_id
        and not model_id.startswith(_PRIVATE)
    )


def triton_name(model_id: ModelId) -> TritonName:
    """Return the model's name in Triton: always the same, and different for different ids."""
    if is_safe_name(model_id):
        return TritonName(model_id)
    raw = model_id.encode()
    escaped = _ESCAPED + _escape(raw)
    if len(escaped) <= _MAX_NAME_BYTES:
        return TritonName(escaped)
    return TritonName(_HASHED + hashlib.sha256(raw).hexdigest())


def numbered_name(model_id: ModelId, number: int) -> TritonName:
    """Return another name of the model, one for each number, that no other model ever has."""
    return TritonName(f"{_NUMBERED}{number}.{hashlib.sha256(model_id.encode()).hexdigest()}")


def strip_last_slash(url: str) -> str:
    """Return the same place for a folder that is written with or without a slash at its end."""
    return url.rstrip("/") or url


def fresh_name(model_id: ModelId) -> TritonName:
    """Return a name that no model has had in any Triton."""
    token = secrets.token_hex(_FRESH_BYTES)
    return TritonName(f"{_FRESH}{token}.{hashlib.sha256(model_id.encode()).hexdigest()}")


def private_name(entry: TritonName, own_name: str) -> TritonName:
    """Return the name in Triton of a model that only others of its package call.

    Two packages may use the same names within (server#5150), so each has its own prefix. `_h` in
    front of a hash is no escape, so a name made to look like the hash of another does not meet it.
    """
    prefix = f"{_PART}{hashlib.sha256(entry.encode()).hexdigest()[:16]}."
    raw = own_name.encode("utf-8", "surrogatepass")
    escaped = _escape(raw)
    if len(prefix + escaped) > _MAX_NAME_BYTES:
        escaped = "_h" + hashlib.sha256(raw).hexdigest()
    return TritonName(prefix + escaped)


def show_own_names(text: str) -> str:
    """Return a text with the models' names within their packages for their private names."""
    return _PRIVATE_NAME.sub(_own_name, text)


def _own_name(match: re.Match[str]) -> str:
    """Undo the escapes; a name that was hashed stays as it is."""
    if match["hashed"]:
        return match[0]
    raw = _ESCAPE.sub(lambda escape: bytes([int(escape[1], 16)]), match["own"].encode())
    return raw.decode("utf-8", "backslashreplace")


def _escape(raw: bytes) -> str:
    """Write each byte as `_hh` that is no letter, digit or dash."""
    return "".join(chr(byte) if byte in _PLAIN else f"_{byte:02x}" for byte in raw)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Describes a package as a load request does."""

    url: str  # kept as given, since `modelUrl` must echo it
    # the format that the caller names (`onnx`, `tensorflow:1.5`); None if the files decide
    model_type: str | None = None
    schema: str | None = None  # the path of a file with inputs and outputs
    # the model that answers in a package with several; None if the files decide
    entry: str | None = None
    config: str | None = None  # replaces the package's config.pbtxt
    # safe relative paths and contents: the package, if there are any. `url` only identifies it then
    files: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    # the memory that the model takes, says the caller; counts instead of the package's own figure
    declared_bytes: int | None = None
    # `url` is a folder of the disk cache. No caller names it: they know the model by `key`
    is_cached: bool = False
    key: str = ""  # the key that the store has for it
    # None if `url` is the whole package. Else it is a model with a config.pbtxt, and the package
    # has also the models in the folders beside it to which it refers, and those named here
    helpers: tuple[str, ...] | None = None
    # where the adapter keeps what it once unpacked of this source, or wrote for it: used instead
    kept: str = field(default="", compare=False)

    @property
    def shown_url(self) -> str:
        """Return the source as callers may see it."""
        return self.key or self.url


class LinkKind(Enum):
    """Names the ways in which an entry of a package comes into the staged folder."""

    SHOWN = "shown"  # as the setting `staging` says
    INSIDE = "inside"  # Triton reads the file only where no link leads out of the folder
    COPIED = "copied"  # Triton changes the file's mode


@dataclass(frozen=True, slots=True)
class Link:
    """Leads from `path` within the staged folder to `target`, a real path."""

    path: str
    target: str
    kind: LinkKind = LinkKind.SHOWN


class Role(Enum):
    """Says what a folder of a package is for."""

    ENTRY = "entry"  # answers to the caller's name
    STEP = "step"  # reached by an ensemble of the package; Triton loads it along
    HELPER = "helper"  # reached by name from Python code; loaded before the entry
    NEIGHBOUR = "neighbour"  # no model: a folder beside the models, which their code may read


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Describes one model of a package, with the contents of its folder in Triton's repository."""

    own_name: str  # within the package
    role: Role
    # as the caller wrote it; None if Triton is to complete the configuration by itself
    config_text: str | None
    links: tuple[Link, ...]
    # made empty: Triton wants a version folder for an ensemble too, and object stores and archives
    # drop empty folders
    folders: tuple[str, ...] = ()
    mentions: frozenset[str] = frozenset()  # models of the package that its Python code names
    backend: str | None = None  # None for an ensemble, and if only Triton can tell
    config_file: str | None = None  # the path of the caller's config.pbtxt


@dataclass(frozen=True, slots=True)
class Package:
    """Describes an inspected package, ready to be staged."""

    root: str
    parts: tuple[ModelPart, ...]  # helpers first, the entry last
    size_bytes: int  # of the files on disk
    declared_bytes: int | None  # of memory, as the package says; None if it does not
    content_key: str  # equal for the same files: learned sizes are kept under it
    backends: frozenset[str] = frozenset()  # Triton's, as far as they can be told
    own_backends: frozenset[str] = frozenset()  # backends whose library the package brings
    warnings: tuple[str, ...] = ()  # oddities that are no faults
    # the CUDA numbers of the GPUs that its instance groups name; None if Triton is free to choose,
    # empty if it runs on CPUs only
    gpus: frozenset[int] | None = None
    content_types: ContentTypes | None = None  # as the entry has opted into
    outputs: tuple[str, ...] = ()  # the names of the entry's; none if only Triton knows them
    # among how many at most its memory on one GPU is divided: Triton's, and one for each instance
    # of a python model. None if nobody can tell
    processes: int | None = None
    leaves_gpu_open: bool = False  # some models use GPUs, and none says which
    asks_for_cache: bool = False  # the config of the entry or a step turns the response cache on
    neighbours: tuple[ModelPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Holds the names that a staged package has in Triton's repository."""

    load: tuple[TritonName, ...]  # to be loaded in this order, the entry last
    along: tuple[TritonName, ...] = ()  # loaded by Triton, as steps of an ensemble
    beside: tuple[str, ...] = ()  # folders that code of the models finds by their own names
    warnings: tuple[str, ...] = ()  # names of the package that other models have

    @property
    def names(self) -> tuple[TritonName, ...]:
        """Return the names of all models of the package."""
        return self.load + self.along


@dataclass(frozen=True, slots=True)
class Payload:
    """A model as the files of a load request."""

    config: str  # JSON with the field names of config.pbtxt
    files: dict[str, bytes]  # keys begin with `file:`


@dataclass(frozen=True, slots=True)
class StagedModel:
    """Describes a package that an earlier run left in Triton's repository."""

    name: TritonName  # of the entry
    model_id: ModelId
    placement: Placement
    # Triton served it when the note was last written. Only then the fields below are known
    is_loaded: bool = False
    gpu: int | None = None  # as in ModelRecord
    source: ModelSource = ModelSource("")  # without the config and files of the load request itself
    can_load_again: bool = False  # the load request brought no config and no files
    content_key: str = ""
    held: Bytes = field(default_factory=lambda: NO_BYTES)
    content_types: ContentTypes | None = None
