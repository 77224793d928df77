"""A stand-in for grpcurl, for lines that people are to paste."""

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)


class Grpcurl:
    """As much of it as the lines use: JSON in, JSON out, messages from reflection."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))

    def run(self, words: list[str]) -> dict[str, object]:
        *options, _, place = words
        service, _, name = place.partition("/")
        method = self._pool.FindServiceByName(service).methods_by_name[name]
        given = dict(zip(options[1::2], options[2::2], strict=True))
        assert options[0] == "-plaintext"
        headers = [tuple(given["-H"].split(": "))] if "-H" in given else []
        request = GetMessageClass(method.input_type)()
        json_format.Parse(given.get("-d", "{}"), request, descriptor_pool=self._pool)
        rpc = self._channel.unary_unary(
            f"/{place}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answer = rpc(request, metadata=headers, timeout=30)
        return json_format.MessageToDict(answer, descriptor_pool=self._pool)
