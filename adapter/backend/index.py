"""Reads the state of a few models from Triton's repository index without parsing all of it.

With 10,000 models parsing all entries of an index costs the event loop milliseconds, and an unload
polls the index. So its bytes are searched for the few names of interest.
"""

from collections.abc import Collection, Iterator

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

_ENTRY, _NAME = 0x0A, b"\x0a"  # field 1 of the response, and field 1 of an entry
_LENGTHS = (1, 2, 3, 4)  # bytes of the length of an entry: up to 256 MiB


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
