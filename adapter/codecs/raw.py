"""Bodies that are one string, or the bytes of numbers."""

import math
import re
import struct

from adapter.codecs.base import Codec, Source, Values
from adapter.core.tensors import SIZES, ContentTypes, Tensor
from adapter.errors import InvalidRequest, PayloadTooLarge

# Of bytes that come without their length, which stands in front of them in V2.
_MAX_UNKNOWN_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<I")
_MEDIA = re.compile(r"(?:image|audio|video)/(?:\*|[a-z0-9][a-z0-9.+-]*)")


class Raw(Codec):
    """A picture, a sound or a document: one string of bytes, whatever is in it."""

    listed: tuple[str, ...] = (
        "image/*",
        "audio/*",
        "video/*",
        "application/pdf",
        "application/x-image",
    )
    is_answer = False

    def accepts(self, media_type: str) -> bool:
        """Return whether the type is a picture, a sound, a video or a document."""
        return media_type in self.listed or _MEDIA.fullmatch(media_type) is not None

    def needed(self, types: ContentTypes) -> str | None:
        """Return what the model's input would have to be for a string; None if it fits."""
        return None if _is_one_string_input(types.input) else "TYPE_STRING with dims [1]"

    async def decode(self, source: Source, length: int | None, types: ContentTypes) -> Values:
        """Return the body as one string, or as the bytes of the input's numbers."""
        if length is None:
            length = len(await source.whole(_MAX_UNKNOWN_BYTES))
        if not length:
            raise InvalidRequest("a body is needed")
        if types.input.datatype != "BYTES":
            return Values(source, 0, length, shape=_choose_shape(types, length))
        if length >= 2**32:
            raise PayloadTooLarge(f"the body has {length} bytes; a string has less than 4 GiB")
        shape = (1,) * (1 + types.is_batched)
        return Values(source, 0, length, front=_LENGTH.pack(length), shape=shape)


class Text(Raw):
    """A text: one string of UTF-8."""

    media_type = "text/plain"
    parameters = "; charset=utf-8"
    listed = (media_type,)
    is_answer = True

    def accepts(self, media_type: str) -> bool:
        """Return whether the type is plain text."""
        return media_type == self.media_type

    def can_answer(self, output: Tensor, *, is_batched: bool) -> bool:  # noqa: ARG002
        """Return whether an output is one string."""
        return _is_one_string_output(output)

    async def encode(self, datatype: str, shape: tuple[int, ...], values: Values) -> Values:
        """Return the string alone, without its length."""
        if datatype != "BYTES":
            raise ValueError(f"it is {datatype} and no string")
        return _cut_one_string(shape, values)


class Octets(Raw):
    """One string, or numbers as Triton has them."""

    media_type = "application/octet-stream"
    listed = (media_type,)
    may_be_json = is_answer = True

    def accepts(self, media_type: str) -> bool:
        """Return whether the type is that of plain bytes."""
        return media_type == self.media_type

    def needed(self, types: ContentTypes) -> str | None:
        """Return what the model's input would have to be for plain bytes; None if it fits."""
        datatype = types.input.datatype
        shape = types.input.shape
        if datatype not in {*SIZES, "BYTES"}:
            return "one string, or a type that NumPy has"
        is_sized = datatype in SIZES and shape.count(-1) <= 1
        if is_sized or _is_one_string_input(types.input):
            return None
        return "one string, or numbers with one -1 at most"

    def can_answer(self, output: Tensor, *, is_batched: bool) -> bool:  # noqa: ARG002
        """Return whether an output is one string, or numbers."""
        return output.datatype != "BYTES" or _is_one_string_output(output)

    async def encode(self, datatype: str, shape: tuple[int, ...], values: Values) -> Values:
        """Return a string without its length, or numbers as they are."""
        return values if datatype != "BYTES" else _cut_one_string(shape, values)


def _is_one_string_input(tensor: Tensor) -> bool:
    return tensor.datatype == "BYTES" and tensor.shape in {(1,), (-1,)}


def _is_one_string_output(output: Tensor) -> bool:
    return output.datatype == "BYTES" and set(output.shape) <= {1, -1}


def _cut_one_string(shape: tuple[int, ...], values: Values) -> Values:
    if math.prod(shape) != 1:
        raise ValueError(f"it has {math.prod(shape)} strings; only a single one can be answered")
    return Values(values.source, values.skip + _LENGTH.size, values.size - _LENGTH.size)


def _choose_shape(types: ContentTypes, length: int) -> tuple[int, ...]:
    """Return the shape of a lone example with so many bytes, as Triton would take it."""
    dims = types.input.shape
    datatype = types.input.datatype
    known = math.prod(size for size in dims if size != -1) * SIZES[datatype]
    free, rest = divmod(length, known)
    if rest or (-1 not in dims and free != 1):
        text = f"{length} bytes are not {datatype} {list(dims)} of input {types.input.name!r}"
        raise InvalidRequest(text)
    shape = tuple(free if size == -1 else size for size in dims)
    return (1, *shape) if types.is_batched else shape
