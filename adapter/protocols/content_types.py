"""The content types that a model with one input opted into, besides V2's own."""

import re
from dataclasses import dataclass

from adapter.protocols.tensors import SIZES, Tensor, may_cast

# The name of the list in a config.pbtxt.
PARAMETER = "adapter_content_types"

NPY, CSV, BYTES = "application/x-npy", "text/csv", "application/octet-stream"
TEXT = "text/plain"
_NPY_CAST = f"{NPY};cast"
_KINDS = ("image", "audio", "video")
_DOCUMENTS = frozenset({"application/x-image", "application/pdf", TEXT})
_RAW = re.compile(rf"(?:{'|'.join(_KINDS)})/(?:\*|[a-z0-9][a-z0-9.+-]*)")
KNOWN = ", ".join(
    [*(f"{kind}/*" for kind in _KINDS), *sorted(_DOCUMENTS), BYTES, NPY, _NPY_CAST, CSV]
)
_TABLE = 2


@dataclass(frozen=True, slots=True)
class ContentTypes:
    """`types` are media types in lower case, some with `*` for any subtype. `casts`: numbers
    of an npy body become those of the input. `is_batched`: a dimension for the batch stands before
    those of each tensor, whose shapes are as the config has them. `outputs`: none where only
    Triton knows them.
    """

    types: tuple[str, ...]
    casts: bool
    is_batched: bool
    input: Tensor
    outputs: tuple[Tensor, ...]

    def __contains__(self, media_type: str) -> bool:
        kind = media_type.partition("/")[0]
        return media_type in self.types or f"{kind}/*" in self.types


def is_raw(media_type: str) -> bool:
    """Return whether a body of the type is one string of bytes, whatever is in it."""
    return media_type in _DOCUMENTS or _RAW.fullmatch(media_type) is not None


def may_have(media_type: str) -> bool:
    """Return whether a model may opt into the type."""
    return media_type in {NPY, CSV, BYTES} or is_raw(media_type)


def content_types(
    text: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], *, is_batched: bool
) -> ContentTypes:
    """Read the list that a model has; `inputs` are all of its inputs.

    Raises ValueError with the reason.
    """
    asked = [part.strip().lower() for part in text.split(",")]
    names = []
    for part in asked:
        name, _, parameter = (each.strip() for each in part.partition(";"))
        if not may_have(name) or (parameter and (name, parameter) != (NPY, "cast")):
            raise ValueError(f"{part[:100]!r} is none of the types that there are: {KNOWN}")
        names.append(name)
    if len(inputs) != 1:
        count = len(inputs) or "none"
        raise ValueError(f"a model with one input is needed; the config names {count}")
    casts = any(part.endswith("cast") for part in asked)
    found = ContentTypes(tuple(dict.fromkeys(names)), casts, is_batched, inputs[0], outputs)
    for name in found.types:
        if needed := _needed(name, found):
            tensor, batch = found.input, ", and a batch" if is_batched else ""
            what = f"{tensor.datatype} {list(tensor.shape)}{batch}"
            raise ValueError(f"{name} needs {needed}; input {tensor.name[:100]!r} is {what}")
    if casts and not may_cast(datatype := found.input.datatype, datatype):
        raise ValueError(f"{_NPY_CAST} needs an input of numbers; it is {datatype}")
    return found


def _needed(media_type: str, found: ContentTypes) -> str | None:
    """Return what the input is not."""
    tensor = found.input
    datatype, rank = tensor.datatype, len(tensor.shape) + found.is_batched
    is_string = datatype == "BYTES" and len(tensor.shape) == 1 and tensor.shape[0] in {1, -1}
    if is_raw(media_type):
        return None if is_string else "TYPE_STRING with dims [1]"
    if media_type == NPY:
        return None if datatype in SIZES else "a type that NumPy has"
    if media_type == BYTES:
        if datatype not in {*SIZES, "BYTES"}:
            return "one string, or a type that NumPy has"
        is_sized = datatype in SIZES and sum(size == -1 for size in tensor.shape) <= 1
        return None if is_string or is_sized else "one string, or numbers with one -1 at most"
    if not may_cast(datatype, datatype):
        return "a type of INT8 to INT64, UINT8 to UINT64 or FP16 to FP64"
    return None if rank == _TABLE else "two dimensions, rows and columns, the batch included"
