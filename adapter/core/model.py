"""Values that name and describe a model. Frozen; validated where they are made."""

import re
from dataclasses import dataclass
from typing import NewType

from adapter.errors import InvalidRequest

# The caller's opaque name of a model: any UTF-8 text.
ModelId = NewType("ModelId", str)

# The name that Triton knows it by: one safe path segment (core/names.py).
TritonName = NewType("TritonName", str)

MAX_MODEL_ID_BYTES = 1024
_UNPRINTABLE = re.compile("[\x00\ud800-\udfff]")


def parse_model_id(text: str) -> ModelId:
    """Refuse what cannot be a name at all; everything else is opaque and accepted as it is."""
    if not text:
        raise InvalidRequest("model_name is empty")
    if _UNPRINTABLE.search(text):
        raise InvalidRequest("model_name holds a NUL or is not valid UTF-8")
    if (size := len(text.encode())) > MAX_MODEL_ID_BYTES:
        raise InvalidRequest(
            f"model_name is {size} bytes long; at most {MAX_MODEL_ID_BYTES} are accepted"
        )
    return ModelId(text)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the caller says the files are. `url` is kept as given: `modelUrl` must echo it."""

    url: str


@dataclass(frozen=True, slots=True)
class Package:
    """A model directory that was looked at and can be staged.

    `root` is the real path of the folder that holds config.pbtxt. `size_bytes` is what the files
    take on disk. `declared_bytes` is what the package says it takes in memory, None when silent.
    `content_key` is equal for the same files: it is what learned sizes are kept under.
    """

    root: str
    config_text: str
    size_bytes: int
    declared_bytes: int | None
    content_key: str
