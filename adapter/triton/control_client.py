"""Provides tritonclient for control calls: with channel options of our own, an unparsed repository
index, and a retry policy for calls that never reached Triton.

With 10,000 models parsing all entries of an index costs the event loop milliseconds, and an unload
polls the index. So its bytes are searched for the few names of interest, and all that wait share
one answer.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from adapter.core.calls import ChannelOptions, keepalive
from adapter.errors import BackendUnavailable

_ENTRY, _NAME = 0x0A, b"\x0a"  # field 1 of the response, and field 1 of an entry
_LENGTHS = (1, 2, 3, 4)  # bytes of the length of an entry: up to 256 MiB
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
_ATTEMPTS = 6
_RETRY_SECONDS = 6.0
# Triton is asked twice a second on it whether it is live, so that no ping is sent while it answers.
_KEEPALIVE = keepalive(seconds=30, answer_seconds=30)


class SharedIndex:
    """Shares the answers of `ask`: all that request one during a call share the next.

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


class ControlClient(InferenceServerClient):  # type: ignore[misc]  # tritonclient has no types
    def __init__(self, address: str, keepalive: ChannelOptions = _KEEPALIVE) -> None:
        """Set the address, `host:port` or `unix:/path`. grpc connects at the first call."""
        super().__init__(address, channel_args=[*_CHANNEL, *keepalive])

    async def wait_broken(self) -> None:
        """Return when the connection has ended: the present one, or else the next."""
        ready = grpc.ChannelConnectivity.READY
        while (state := self._channel.get_state()) is not ready:
            await self._channel.wait_for_state_change(state)
        await self._channel.wait_for_state_change(ready)

    async def repository_index_bytes(self, client_timeout: float) -> bytes:
        """Return the unparsed answer: parsing a long list costs more than all else."""
        ask = self._channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")
        try:
            return bytes(await ask(b"", timeout=client_timeout))
        except grpc.aio.AioRpcError as error:
            raise InferenceServerException(error.details(), str(error.code())) from error

    async def has_model(self, name: str, client_timeout: float) -> bool:
        """Return whether the model is loaded, by its config. ModelReady would not say: since 2.67
        it is False for a model whose `is_ready` says so, and for one whose process has died.
        """
        try:
            await self.get_model_config(name, client_timeout=client_timeout)
        except InferenceServerException as error:
            if error.status() == str(grpc.StatusCode.NOT_FOUND):
                return False
            raise
        return True

    async def infer_once(
        self,
        request: pb.ModelInferRequest,
        client_timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send the inference, and leave its answer unparsed: nobody needs it."""
        ask = self._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        sent, metadata = request.SerializeToString(), tuple((headers or {}).items())
        try:
            await ask(sent, timeout=client_timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise InferenceServerException(error.details(), str(error.code())) from error


def never_arrived(error: BaseException) -> bool:
    """Return whether the call never reached Triton; one that did may be what killed it."""
    return isinstance(error, BackendUnavailable) and not error.delivered


def control_retries(
    on_retry: Callable[[], None],
    *,
    wait_seconds: float = 0.2,
) -> AsyncRetrying:
    """Return a policy that outlasts a restart of Triton, which takes about a second.

    Loading a loaded model and unloading an absent one are no-ops in Triton, so each control call
    may be repeated. `on_retry` is called before each further attempt.
    """

    def count(_: RetryCallState) -> None:
        on_retry()

    return AsyncRetrying(
        retry=retry_if_exception(never_arrived),
        stop=stop_after_attempt(_ATTEMPTS) | stop_after_delay(_RETRY_SECONDS),
        wait=wait_random_exponential(multiplier=wait_seconds, max=2.0),
        before_sleep=count,
        reraise=True,
    )
