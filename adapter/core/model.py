"""Values that name and describe a model. Immutable; validated where they are created.

Triton pastes model names into paths, shared-memory keys and, before 25.08, a shell command; from
26.03 on it refuses `/` and `..` (docs/design/triton.md, Names). So only a safe path segment is used
as it is, in Triton, on disk and in the logs of the stubs; every other id gets a private name made
of safe characters alone:

    fraud-v2.tar.gz    fraud-v2.tar.gz
    team/a b           ta.u.team_2fa_20b         each other byte as _hh
    (longer than 200)  ta.h.<sha256 of the id>
    (name is stuck)    ta.r.<n>.<sha256 of the id>
    (inspected only)   ta.i.<sha256 of the id>
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


def _own_name(found: re.Match[str]) -> str:
    """Undo the escapes; a name that was hashed stays as it is."""
    if found["hashed"]:
        return found[0]
    raw = _ESCAPE.sub(lambda escape: bytes([int(escape[1], 16)]), found["own"].encode())
    return raw.decode("utf-8", "backslashreplace")


def _escape(raw: bytes) -> str:
    """Write each byte as `_hh` that is no letter, digit or dash."""
    return "".join(chr(byte) if byte in _PLAIN else f"_{byte:02x}" for byte in raw)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A load request's description of a package. `url` is kept as given: `modelUrl` must echo it.

    `model_type` is the format that the caller names (`onnx`, `tensorflow:1.5`), `schema` the path
    of a file with inputs and outputs, `entry` the model that answers in a package with several;
    None where the files decide. `config` replaces the package's config.pbtxt. `files`, safe
    relative paths and contents, are the package if there are any; `url` is only an identity then.
    `declared_bytes`: the memory that the model takes according to the caller; it overrides the
    package's own figure. `is_cached`: `url` is a folder of the disk cache, which no
    caller names; they know the model by `key`, that of the store. `helpers`: where the package is
    a model with a config.pbtxt, the models in the folders beside it to which it refers are part of
    the package, and so are those that `helpers` names; None where `url` is the whole package.
    """

    url: str
    model_type: str | None = None
    schema: str | None = None
    entry: str | None = None
    config: str | None = None
    files: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    declared_bytes: int | None = None
    is_cached: bool = False
    key: str = ""
    helpers: tuple[str, ...] | None = None
    # where the adapter keeps what it once unpacked of this source, or wrote for it: used instead
    kept: str = field(default="", compare=False)

    @property
    def told_url(self) -> str:
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
    ENTRY = "entry"  # answers to the caller's name
    STEP = "step"  # reached by an ensemble of the package; Triton loads it along
    HELPER = "helper"  # reached by name from Python code; loaded before the entry
    NEIGHBOUR = "neighbour"  # no model: a folder beside the models, which their code may read


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One model of a package, with the contents of its folder in Triton's repository.

    `own_name` is its name within the package. `config_text` is as the caller wrote it, None when
    Triton is to complete the configuration by itself. `folders` are made empty: Triton wants a
    version folder for an ensemble too, and object stores and archives drop empty ones. `mentions`
    are the models of the package that its Python code names.
    """

    own_name: str
    role: Role
    config_text: str | None
    links: tuple[Link, ...]
    folders: tuple[str, ...] = ()
    mentions: frozenset[str] = frozenset()
    backend: str | None = None  # None for an ensemble, and if only Triton can tell
    config_file: str | None = None  # the path of the caller's config.pbtxt


@dataclass(frozen=True, slots=True)
class Package:
    """An inspected package, ready to be staged. `parts` has helpers first and the entry last.

    `size_bytes` is what the files take on disk, `declared_bytes` what the package says it takes in
    memory (None when silent). `content_key` is equal for the same files: learned sizes are kept
    under it. `backends` are Triton's, as far as they can be told; of `own_backends` the package
    brings the library. `warnings`: what is odd but no fault. `gpus` are the CUDA
    numbers of the GPUs that the package's instance groups name, None when Triton is free to choose,
    empty when it runs on CPUs only. `content_types`: what the entry opted into, None for nothing.
    `outputs`: the names of the entry's, none where only Triton knows them. `leaves_gpu_open`: it
    runs on GPUs, and says of none of its models on which.
    `processes`: among how many of them at most its memory on one GPU is divided, None where nobody
    can tell: Triton's, and one for each instance of a python model.
    """

    root: str
    parts: tuple[ModelPart, ...]
    size_bytes: int
    declared_bytes: int | None
    content_key: str
    backends: frozenset[str] = frozenset()
    own_backends: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()
    gpus: frozenset[int] | None = None
    content_types: ContentTypes | None = None
    outputs: tuple[str, ...] = ()
    processes: int | None = None
    leaves_gpu_open: bool = False
    asks_for_cache: bool = (
        False  # the entry's, or a step's, config turns Triton's response cache on
    )
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
        return self.load + self.along


@dataclass(frozen=True, slots=True)
class Payload:
    """A model as the files of a load request."""

    config: str  # JSON with the field names of config.pbtxt
    files: dict[str, bytes]  # keys begin with `file:`


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A package that an earlier run left in Triton's repository. `name` is the entry's.

    `is_loaded`: Triton served it when the note was last written. Only then the fields below are
    known. `gpu`: as in ModelRecord. `source` lacks what the load request itself brought, its config
    and files, and `can_load_again` is False where it brought any.
    """

    name: TritonName
    model_id: ModelId
    placement: Placement
    is_loaded: bool = False
    gpu: int | None = None
    source: ModelSource = ModelSource("")
    can_load_again: bool = False
    content_key: str = ""
    held: Bytes = field(default_factory=lambda: NO_BYTES)
    content_types: ContentTypes | None = None
