"""Defines a content type: how a body becomes a tensor, and a tensor an answer."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from adapter.core.tensors import ContentTypes, Tensor
from adapter.errors import PayloadTooLarge
from adapter.runtime.threads import CONVERSIONS

P = ParamSpec("P")
T = TypeVar("T")

# The largest text that is converted, and from which size on a thread does that.
MAX_TEXT_BYTES = 8 * 2**20
SLOW_BYTES = 64 * 2**10
# In which an object of JSON begins.
_BEGIN_BYTES = 4 * 2**10
_BLANKS = b" \t\r\n"


async def converted(size: int, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return act(*args), computed by a thread where so many bytes take long.

    A call of C, such as json.loads, keeps all other threads waiting: give each a few thousand
    values at a time, as csv.py does.
    """
    if size <= SLOW_BYTES:
        return act(*args, **kwargs)
    return await CONVERSIONS.run(act, *args, **kwargs)


class Source:
    """A body whose beginning may be looked at before it is passed on. Close it with `aclose`."""

    def __init__(self, body: bytes | AsyncIterator[bytes]) -> None:
        self.is_whole = isinstance(body, bytes)
        self._held = body if isinstance(body, bytes) else b""
        self._more = None if isinstance(body, bytes) else body

    async def aclose(self) -> None:
        """Close the stream that the body comes from."""
        close = getattr(self._more, "aclose", None)
        if close is not None:
            await close()

    async def start(self, size: int) -> bytes:
        """Return at least so many bytes, or all that there are."""
        while self._more is not None and len(self._held) < size:
            piece = await anext(self._more, None)
            if piece is None:
                self._more = None
            else:
                self._held += piece
        return self._held

    async def whole(self, most: int) -> bytes:
        """Return the whole body. Raise PayloadTooLarge if it has more than so many bytes."""
        held = [await self.start(1)]
        size = len(held[0])
        while size <= most and self._more is not None:
            async for piece in self._more:
                held.append(piece)
                size += len(piece)
                if size > most:
                    break
            else:
                self._more = None
        if size > most:
            raise PayloadTooLarge(f"a body of this type may have {most} bytes at most")
        self._held = b"".join(held)
        self.is_whole = True
        return self._held

    async def begins_with_brace(self) -> bool:
        """Return whether the first byte that is no blank is that of an object in JSON, and one of
        the first 4096.
        """
        seen = 0
        while True:
            held = await self.start(seen + 1)
            begin = held[:_BEGIN_BYTES].lstrip(_BLANKS)
            if begin or len(held) == seen or len(held) >= _BEGIN_BYTES:
                return begin.startswith(b"{")
            seen = len(held)

    def rest(self, skip: int) -> bytes:
        """Return all but the first `skip` bytes of a body that is whole."""
        held, self._held = self._held, b""
        return held[skip:]

    async def pieces(self, skip: int) -> AsyncIterator[bytes]:
        """Yield all but the first `skip` bytes, which are there."""
        held, self._held = self._held, b""
        yield held[skip:]
        if self._more is not None:
            async for piece in self._more:
                yield piece


@dataclass(slots=True)
class Values:
    """Describes where the values of a tensor are in a body."""

    source: Source
    skip: int  # the bytes of the body in front of the values
    size: int  # the bytes of the values
    front: bytes = b""  # bytes to write in front of the values
    shape: tuple[int, ...] = ()  # of a request's tensor
    datatype: str | None = None  # of a request's values; None if it is the input's


class Codec:
    """A content type beside V2's own. It raises ValueError, or an error of the adapter, with the
    reason for which it refuses a body or an answer.
    """

    media_type: str  # of an answer, and of what its errors begin with
    parameters = ""  # of the media type of an answer
    listed: tuple[str, ...]  # the types that a model may list, with `*` for any subtype
    options: tuple[str, ...] = ()  # words that may follow such a type behind a semicolon
    may_be_json = False  # a body that begins as an object of JSON is V2's
    holds_whole_body = False  # until it is converted; the byte budget is charged for all of it
    is_answer = True

    def accepts(self, media_type: str) -> bool:
        """Return whether a body of the type, or an item of a model's list, is for this codec."""
        return media_type in self.listed

    def check(self, media_type: str, types: ContentTypes) -> None:
        """Raise ValueError for a model that cannot list the type; `types` are what it lists."""
        if needed := self.needed(types):
            tensor = types.input
            batch = ", and a batch" if types.is_batched else ""
            what = f"{tensor.datatype} {list(tensor.shape)}{batch}"
            raise ValueError(f"{media_type} needs {needed}; input {tensor.name[:100]!r} is {what}")

    def needed(self, types: ContentTypes) -> str | None:
        """Return what the model's input would have to be, None if it fits."""
        raise NotImplementedError

    async def decode(self, source: Source, length: int | None, types: ContentTypes) -> Values:
        """Return the values of a body; `length` of it, None where nobody knows."""
        raise NotImplementedError

    def can_answer(self, output: Tensor, *, is_batched: bool) -> bool:
        """Return whether the only output of a model can be answered as the type."""
        raise NotImplementedError

    async def encode(self, datatype: str, shape: tuple[int, ...], values: Values) -> Values:
        """Return the body of an answer with a tensor's values."""
        raise NotImplementedError
