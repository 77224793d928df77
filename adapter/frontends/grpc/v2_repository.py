"""Triton's model repository extension over gRPC: protobuf for frontends/model_repository.py."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from adapter.core.model import ModelId, parse_model_id
from adapter.errors import InvalidRequest, PayloadTooLarge
from adapter.frontends.grpc.middleware import Context, ids_of
from adapter.frontends.model_repository import Repository

_MAX_PARAMETERS = 10_000


class GrpcRepository:
    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def index(self, message: bytes, _: Context) -> bytes:
        request = _parsed(pb.RepositoryIndexRequest, message)
        entries = await self._repository.index(only_ready=request.ready)
        models = [pb.RepositoryIndexResponse.ModelIndex(**asdict(entry)) for entry in entries]
        return serialised(pb.RepositoryIndexResponse(models=models))

    async def load(self, message: bytes, context: Context) -> bytes:
        request = _parsed(pb.RepositoryModelLoadRequest, message)
        model_id, parameters = _about(request)
        await self._repository.load(model_id, parameters, **ids_of(context))
        return serialised(pb.RepositoryModelLoadResponse())

    async def unload(self, message: bytes, context: Context) -> bytes:
        request = _parsed(pb.RepositoryModelUnloadRequest, message)
        model_id, parameters = _about(request)
        await self._repository.unload(model_id, parameters, **ids_of(context))
        return serialised(pb.RepositoryModelUnloadResponse())


def _parsed(kind: Any, message: bytes) -> Any:
    try:
        request = kind.FromString(message)
    except DecodeError as error:
        raise InvalidRequest(f"the message is no {kind.DESCRIPTOR.name}") from error
    if request.repository_name:  # nor does Triton
        raise InvalidRequest("repository_name is not supported: there is one repository")
    return request


def _about(request: Any) -> tuple[ModelId, Mapping[str, Any]]:
    if len(request.parameters) > _MAX_PARAMETERS:
        raise PayloadTooLarge(
            f"{len(request.parameters)} parameters; at most {_MAX_PARAMETERS} are accepted"
        )
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice") or "", None)
        for name, value in request.parameters.items()
    }
    return parse_model_id(request.model_name), parameters


def serialised(message: Any) -> bytes:
    return bytes(message.SerializeToString())
