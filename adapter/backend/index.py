"""Asks for Triton's repository index once for all that wait for it, and reads the state of a few
models from it without parsing all of it.

With 10,000 models parsing all entries of an index costs the event loop milliseconds, and an unload
polls the index. So its bytes are searched for the few names of interest.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

_ENTRY, _NAME = 0x0A, b"\x0a"  # field 1 of the response, and field 1 of an entry
_LENGTHS = (1, 2, 3, 4)  # bytes of the length of an entry: up to 256 MiB


class SharedIndex:
    """Shares the answers of `ask`: all that want one while a call is under way share the next.

    With 10,000 models Triton takes 57 ms for an answer (docs/design/triton.md, Loads and unloads).
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        self._ask = ask
        self._current: asyncio.Task[bytes] | None = None
        self._next: asyncio.Task[bytes] | None = None

    async def read(self) -> bytes:
        """Return the answer of a call that begins after this one, so that it is not out of date."""
        if self._next is None:
            self._next = asyncio.create_task(self._ask_after(self._current))
        return await asyncio.shield(self._next)

    async def _ask_after(self, earlier: asyncio.Task[bytes] | None) -> bytes:
        if earlier is not None:
            await asyncio.wait({earlier})
        self._current, self._next = self._next, None
        try:
            return await self._ask()
        finally:
            if self._current is asyncio.current_task():
                self._current = None


def in_state(index: bytes, names: Collection[str], states: Collection[str]) -> set[str]:
    """Return those of `names` that have a version in one of `states`. `index` is a serialised
    RepositoryIndexResponse.
    """
    return {name for name in names if any(e.state in states for e in _entries(index, name))}


def _entries(index: bytes, name: str) -> Iterator[pb.RepositoryIndexResponse.ModelIndex]:
    """Yield the entries of that name, also false matches within the text of other entries."""
    raw = name.encode()
    mark = _NAME + _varint(len(raw)) + raw
    at = index.find(mark)
    while at >= 0:
        for size in _LENGTHS:
            begin = at - size
            if begin >= 1 and index[begin - 1] == _ENTRY and _is_varint(index[begin:at]):
                yield from _parsed(index[at : at + _number(index[begin:at])], name)
        at = index.find(mark, at + 1)


def _parsed(entry: bytes, name: str) -> Iterator[pb.RepositoryIndexResponse.ModelIndex]:
    try:
        found = pb.RepositoryIndexResponse.ModelIndex.FromString(entry)
    except DecodeError:  # these bytes were no entry
        return
    if found.name == name:
        yield found


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits a byte
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _number(raw: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(raw))


def _is_varint(raw: bytes) -> bool:
    return raw[-1] < 0x80 and all(byte >= 0x80 for byte in raw[:-1])  # noqa: PLR2004
