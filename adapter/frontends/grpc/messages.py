"""Fields of messages that are not parsed; the model that a message names, and its name towards
Triton and the client.

ModelMesh names the model in metadata, other clients in the message (docs/modelmesh.md).
"""

from collections.abc import Sequence

from adapter.control.door import ModelRecord
from adapter.core.calls import RpcMetadata
from adapter.core.model import ModelId, parse_model_id
from adapter.core.triton_input import OF_THE_CONNECTION
from adapter.errors import InvalidRequest
from adapter.relay.protobuf import (
    DELIMITED,
    FIXED,
    MAX_FIELDS,
    MAX_TAG,
    MIN_TAG,
    VARINT,
    Malformed,
    encoded_field,
    varint,
)

_ID_BIN = "mm-model-id-bin"
_ID = "mm-model-id"

# grpc writes its own headers of one hop, and ModelMesh's are for the adapter
_OF_THE_HOP = OF_THE_CONNECTION | {"content-type", "triton_grpc_error", "user-agent"}
_PREFIXES_OF_THE_HOP = (":", "grpc-", "mm-")


def forwarded(metadata: RpcMetadata) -> RpcMetadata:
    """Return the metadata without what is about one hop."""
    return [
        (key, value)
        for key, value in metadata
        if key not in _OF_THE_HOP and not key.startswith(_PREFIXES_OF_THE_HOP)
    ]


def names_model(metadata: RpcMetadata) -> bool:
    """Return whether the metadata names a model, as ModelMesh's does."""
    return any(key in {_ID_BIN, _ID} for key, _ in metadata)


def id_of_mesh(metadata: RpcMetadata) -> ModelId | None:
    """Return the id in the metadata. The binary form wins: the other cannot hold every id."""
    ids = {key: value for key, value in metadata if key in {_ID, _ID_BIN}}
    value = ids.get(_ID_BIN, ids.get(_ID))
    return None if value is None else parse_name(value, "the metadata")


def id_in(message: bytes, metadata: RpcMetadata, field: int = 1) -> ModelId:
    """Return the id in the metadata, or in the message. Raise InvalidRequest if neither has one."""
    return id_of_mesh(metadata) or parse_name(read_field(message, field) or b"", "the message")


def named_for_triton(message: bytes, record: ModelRecord, field: int = 1) -> bytes:
    """Return the message with Triton's name of the model."""
    name = record.name.encode()
    return message if read_field(message, field) == name else with_field(message, field, name)


def named_for_caller(
    message: bytes,
    record: ModelRecord,
    path: Sequence[int],  # the numbers of the fields around the name, then its own
) -> bytes:
    """Return the message with the client's name of the model."""
    return (
        _replace_nested(message, path, record.asked_for.encode()) if record.is_renamed else message
    )


def _replace_nested(message: bytes, path: Sequence[int], value: bytes) -> bytes:
    """Return the message with `value` in the field at the end of `path`."""
    number, *rest = path
    if rest:
        value = _replace_nested(read_field(message, number) or b"", rest, value)
    return with_field(message, number, value)


def parse_name(value: str | bytes, where: str) -> ModelId:
    """Parse a model's name; raise InvalidRequest if it is not UTF-8, or no name. `where` says in
    the error where the name came from.
    """
    try:
        return parse_model_id(value if isinstance(value, str) else value.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the model's name in {where} is not UTF-8") from error


def read_field(message: bytes, number: int) -> bytes | None:
    """Return the last occurrence, which counts for a field that is not repeated."""
    occurrences = _occurrences(message, number)
    return message[occurrences[-1][1] : occurrences[-1][2]] if occurrences else None


def read_repeated(message: bytes, number: int) -> list[bytes]:
    """Return all occurrences of a field."""
    return [message[start:end] for _, start, end in _occurrences(message, number)]


def with_field(message: bytes, number: int, value: bytes) -> bytes:
    """Return the message with `value` in place of the occurrence that counts."""
    occurrences = _occurrences(message, number)
    start, _, end = occurrences[-1] if occurrences else (len(message), 0, len(message))
    return b"".join((message[:start], encoded_field(number, value), message[end:]))


def _occurrences(message: bytes, number: int) -> list[tuple[int, int, int]]:
    """Return the start of each occurrence, of its value, and their end."""
    wanted = number << 3 | DELIMITED
    occurrences = []
    at = 0
    end = len(message)
    try:
        for _ in range(MAX_FIELDS):
            if at >= end:
                break
            start = at
            tag, at = varint(message, at)
            value, at = _skip(message, tag, at)
            if tag == wanted:
                occurrences.append((start, value, at))
    except IndexError:
        at = end + 1
    except Malformed as error:
        raise InvalidRequest(str(error)) from error
    if at > end:
        raise InvalidRequest("the message breaks off within a field")
    if at < end:
        raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields")
    return occurrences


def _skip(message: bytes, tag: int, at: int) -> tuple[int, int]:
    """Return where the value of the field with this tag starts and ends."""
    kind = tag & 7
    if not MIN_TAG <= tag <= MAX_TAG or kind not in {VARINT, DELIMITED, *FIXED}:
        raise InvalidRequest(f"the message is not protobuf: it has a field with tag {tag}")
    if kind == DELIMITED:
        size, start = varint(message, at)
        return start, start + size
    if kind == VARINT:
        return at, varint(message, at)[1]
    return at, at + FIXED[kind]
