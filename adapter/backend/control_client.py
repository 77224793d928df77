"""Extends tritonclient by channel options for control calls and an unparsed repository index."""

import grpc
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from adapter.core.calls import ChannelOptions, keepalive

_CHANNEL = [
    # A failure text of more than 8-16 KiB would arrive as RESOURCE_EXHAUSTED "received metadata
    # size exceeds hard limit", its words lost (docs/design/triton.md, Failures).
    ("grpc.max_metadata_size", 4 * 2**20),
    ("grpc.absolute_max_metadata_size", 4 * 2**20),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Notice a restarted Triton within a second, not after grpc's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

# Triton is asked twice a second on it whether it is live, so that no ping is sent while it answers.
_KEEPALIVE = keepalive(seconds=30, answer_seconds=30)


class ControlClient(InferenceServerClient):  # type: ignore[misc]  # tritonclient has no types
    def __init__(self, address: str, keepalive: ChannelOptions = _KEEPALIVE) -> None:
        """`address`: `host:port` or `unix:/path`. grpc connects at the first call."""
        super().__init__(address, channel_args=[*_CHANNEL, *keepalive])

    async def repository_index_bytes(self, client_timeout: float) -> bytes:
        """Return the unparsed answer: parsing a long list costs more than all else."""
        ask = self._channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")
        try:
            return bytes(await ask(b"", timeout=client_timeout))
        except grpc.aio.AioRpcError as error:
            raise InferenceServerException(error.details(), str(error.code())) from error
