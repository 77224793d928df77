"""Limits of gRPC messages that do not go to Triton directly."""

from dataclasses import dataclass

from adapter.settings import Settings


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Bytes. `stream`: a message of a stream, a load that brings files, and any answer; `unary`:
    every other request.
    """

    unary: int
    stream: int


def message_limits(settings: Settings) -> MessageLimits:
    most = settings.grpc_max_message_bytes
    return MessageLimits(
        min(most, settings.grpc_max_unary_bytes), min(most, settings.grpc_max_stream_bytes)
    )
