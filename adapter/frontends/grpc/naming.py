"""The model that a message names, and its name towards Triton and the client.

ModelMesh names the model in metadata, other clients in the message (docs/modelmesh.md).
"""

from collections.abc import Sequence

from adapter.core.calls import RpcMetadata
from adapter.core.model import ModelId, parse_model_id
from adapter.core.registry import ModelRecord
from adapter.errors import InvalidRequest
from adapter.http2.protobuf import read_field, with_field

_ID_BIN, _ID = "mm-model-id-bin", "mm-model-id"

# Headers of one connection or one hop: grpc writes its own, ModelMesh's are for the adapter. With
# `triton_grpc_error` the first failure ends a stream, and at times Triton 2.51 (SIGSEGV).
_OF_THE_HOP = frozenset(
    {
        *("connection", "content-length", "content-type", "host", "keep-alive", "te", "trailer"),
        *("proxy-authenticate", "proxy-authorization", "proxy-connection", "transfer-encoding"),
        *("triton_grpc_error", "upgrade", "user-agent"),
    }
)
_PREFIXES_OF_THE_HOP = (":", "grpc-", "mm-")


def forwarded(metadata: RpcMetadata) -> RpcMetadata:
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
    found = {key: value for key, value in metadata if key in {_ID, _ID_BIN}}
    value = found.get(_ID_BIN, found.get(_ID))
    return None if value is None else _model_id(value, "the metadata")


def id_in(message: bytes, metadata: RpcMetadata, field: int = 1) -> ModelId:
    """InvalidRequest when neither the metadata nor the message names a model."""
    return id_of_mesh(metadata) or _model_id(read_field(message, field) or b"", "the message")


def named_for_triton(message: bytes, record: ModelRecord, field: int = 1) -> bytes:
    name = record.name.encode()
    return message if read_field(message, field) == name else with_field(message, field, name)


def named_for_caller(message: bytes, record: ModelRecord, path: Sequence[int]) -> bytes:
    """`path`: the numbers of the fields around the name, then its own."""
    return _replaced(message, path, record.asked_for.encode()) if record.is_renamed else message


def _replaced(message: bytes, path: Sequence[int], value: bytes) -> bytes:
    number, *rest = path
    if rest:
        value = _replaced(read_field(message, number) or b"", rest, value)
    return with_field(message, number, value)


def _model_id(value: str | bytes, where: str) -> ModelId:
    try:
        return parse_model_id(value if isinstance(value, str) else value.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the model's name in {where} is not UTF-8") from error
