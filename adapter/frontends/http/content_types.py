"""Which content type a request has and which one its answer is to have, where a model opted into
others than V2's own (docs/content-types.md).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from adapter.errors import AdapterError, NotAcceptable, NotJson, UnsupportedMediaType
from adapter.frontends.http import binary
from adapter.protocols.content_types import (
    BYTES,
    CSV,
    NPY,
    PARAMETER,
    TEXT,
    ContentTypes,
    is_raw,
    may_have,
)
from adapter.protocols.tables import TABLE_RANKS
from adapter.protocols.tensors import SIZES

JSON = "application/json"
_QUALITY = re.compile(r"(?:0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")
_MAX_QUOTED = 200
# A browser sends 8. A head has room for 5,000, which take 20 ms to read.
_MOST_RANGES = 100


class Kind(Enum):
    """What is in a body. PERHAPS_JSON: V2 where it begins as an object of JSON, else bytes."""

    V2 = auto()
    PERHAPS_JSON = auto()
    RAW = auto()
    NPY = auto()
    CSV = auto()


@dataclass(frozen=True, slots=True)
class _Range:
    """A media range of Accept; `order` is its place."""

    media_type: str
    quality: float
    order: int

    def matches(self, media_type: str) -> bool:
        kind = media_type.partition("/")[0]
        return self.media_type in {media_type, f"{kind}/*", "*/*"}

    @property
    def precision(self) -> int:
        return 2 - self.media_type.count("*")


def is_typed(content_type: str, accept: str) -> bool:
    """Return whether the request is another for a model that opted in than for one that did not."""
    return not _is_v2(content_type) or accept.strip().lower() not in {"", "*/*", JSON}


def _is_v2(content_type: str) -> bool:
    given = content_type.lower()
    return _media_type(given) in {"", JSON} or binary.MEDIA_TYPE in given


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def kind_of(content_type: str, types: ContentTypes, *, is_packed: bool) -> Kind:
    """Return what a body is, or raise UnsupportedMediaType. `is_packed`: it comes compressed."""
    if _is_v2(content_type):
        return Kind.V2
    media_type = _media_type(content_type)
    if is_packed and media_type == BYTES:
        return Kind.V2
    if media_type == BYTES:
        return Kind.PERHAPS_JSON
    if media_type not in types or is_packed:
        accepted = _accepted(types)
        what = "a compressed body of " if is_packed else ""
        text = f"{what}Content-Type {content_type[:_MAX_QUOTED]!r} is not one that the model takes"
        raise UnsupportedMediaType(f"{text}: {accepted}", accepted=accepted)
    if is_raw(media_type):
        return Kind.RAW
    return Kind.NPY if media_type == NPY else Kind.CSV


def refuse_bytes(types: ContentTypes) -> None:
    """Raise UnsupportedMediaType where the model takes no bytes that are no JSON."""
    if BYTES not in types:
        accepted = _accepted(types)
        text = f"Content-Type {BYTES!r} is for JSON alone here; the model takes {accepted}"
        raise UnsupportedMediaType(text, accepted=accepted)


def explained(
    error: AdapterError, headers: Mapping[str, str], types: ContentTypes | None
) -> AdapterError:
    """Return what is said of a body that is not the JSON for which it was taken: what its type
    would have needed.
    """
    content_type = headers.get("Content-Type", "")
    media_type = _media_type(content_type)
    if not isinstance(error, NotJson) or not may_have(media_type):
        return error
    if types is None:
        taken = f"to take {media_type[:_MAX_QUOTED]!r}"
        need = f"{taken} the model needs the parameter {PARAMETER} in its config"
        return NotJson(f"{error}; {need}", model_id=error.model_id)
    accepted = _accepted(types)  # a compressed body of bytes, which may be JSON alone
    text = (
        f"a compressed body of Content-Type {content_type[:_MAX_QUOTED]!r} is taken as JSON alone"
    )
    return UnsupportedMediaType(f"{text}; uncompressed: {accepted}", accepted=accepted)


def _accepted(types: ContentTypes) -> str:
    return ", ".join([JSON, binary.MEDIA_TYPE, *types.types])


def answer_type(accept: str, types: ContentTypes, *, is_choosing: bool) -> str:
    """Return the type of the answer, or raise NotAcceptable. `is_choosing`: the request may name
    the outputs that it wants, so that only the answer has the types it can be of.
    """
    if not accept.strip():
        return JSON
    ranges = list(_ranges(accept))
    offered = _offered(types, is_choosing=is_choosing)
    best: tuple[float, int] | None = None
    chosen = None
    for media_type in offered:
        fitting = [each for each in ranges if each.matches(media_type)]
        if not fitting:
            continue
        named = max(fitting, key=lambda each: (each.precision, -each.order))
        rank = (named.quality, -named.order)
        if named.quality > 0 and (best is None or rank > best):
            best, chosen = rank, media_type
    if chosen is None:
        asked, made = accept[:_MAX_QUOTED], ", ".join(offered)
        raise NotAcceptable(f"Accept {asked!r} has none of the types that an answer can be: {made}")
    return chosen


def _offered(types: ContentTypes, *, is_choosing: bool) -> list[str]:
    """Return the types that an answer of the model can be of, the preferred ones first."""
    found, outputs = [JSON, binary.MEDIA_TYPE], types.outputs
    if is_choosing or not outputs:
        return [*found, NPY, BYTES, CSV, TEXT]
    if len(outputs) > 1:
        return found
    output = outputs[0]
    may_be_one = output.datatype == "BYTES" and set(output.shape) <= {1, -1}
    is_sized, rank = output.datatype in SIZES, len(output.shape) + types.is_batched
    may_be = {
        NPY: is_sized,
        BYTES: output.datatype != "BYTES" or may_be_one,
        CSV: is_sized and rank in TABLE_RANKS,
        TEXT: may_be_one,
    }
    return [*found, *(media_type for media_type, may in may_be.items() if may)]


def _ranges(accept: str) -> Iterator[_Range]:
    """Yield the media ranges that can be read, of the first `_MOST_RANGES`."""
    for order, part in enumerate(accept.lower().split(",", _MOST_RANGES)[:_MOST_RANGES]):
        media_type, *parameters = (each.strip() for each in part.split(";"))
        quality = 1.0
        for name, _, value in (each.partition("=") for each in parameters):
            if name.strip() == "q":
                given = value.strip()
                quality = float(given) if _QUALITY.fullmatch(given) else 0.0
        if "/" in media_type:
            yield _Range(media_type, quality, order)
