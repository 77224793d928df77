"""Makes Triton's control calls over gRPC: load, unload, index, config, sizes, probes.

Over gRPC because a load over Triton's HTTP port stops every inference on that port for as long as
it takes, and each gRPC load gets a thread of its own (docs/design/triton.md, Loads and unloads).

With 10,000 models parsing all entries of an index costs the event loop milliseconds, and an unload
polls the index. So its bytes are searched for the few names of interest, and all that wait share
one answer.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

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
from tritonclient.grpc.model_config_pb2 import TYPE_STRING
from tritonclient.utils import InferenceServerException

from adapter.core.calls import ChannelOptions, keepalive
from adapter.core.memory import GpuBytes
from adapter.core.model import ModelId, Payload, TritonName
from adapter.core.triton_errors import NOT_EXPLICIT, Faults, is_not_explicit
from adapter.core.triton_input import Unclassified
from adapter.errors import (
    AdapterError,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    InvalidRequest,
    LoadFailed,
)
from adapter.runtime import background, clock
from adapter.runtime.threads import UNPACKS
from adapter.telemetry.tracing import Tracing
from adapter.triton.warm_up import explain_no_warm_up, make_zeros

log = logging.getLogger(__name__)

_SERVICE = "/inference.GRPCInferenceService"
_SPANS = {
    method: (name, {"rpc.system.name": "grpc", "rpc.method": name})
    for method, name in {
        "load_model": "inference.GRPCInferenceService/RepositoryModelLoad",
        "unload_model": "inference.GRPCInferenceService/RepositoryModelUnload",
        "infer_once": "inference.GRPCInferenceService/ModelInfer",
    }.items()
}
_CHANNEL = [
    # A failure text of more than 8-16 KiB would arrive as RESOURCE_EXHAUSTED "received metadata
    # size exceeds hard limit", its words lost (docs/design/triton.md, Failures).
    ("grpc.max_metadata_size", 4 * 2**20),
    ("grpc.absolute_max_metadata_size", 4 * 2**20),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Notice a restarted Triton within a second, not after grpc's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The time of one attempt to connect, which a busy Triton may need.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
# Triton is probed twice a second on this connection, so that no ping is sent while it answers.
_KEEPALIVE = keepalive(seconds=30, answer_seconds=30)
_READY = frozenset({"READY"})
_LOADING = frozenset({"LOADING"})
_PRESENT = _READY | {"LOADING", "UNLOADING"}
_POLL_FIRST_SECONDS = 0.01
_POLL_LAST_SECONDS = 0.1
_PROBE_SECONDS = 0.5
_PROBE_TIMEOUT = 2.0
_CALL_SECONDS = 10.0  # of a control call that loads and unloads nothing, such as an index
_LAST_SECONDS = 4.0  # for unloading uploaded models at the stop
_INDEX_ATTEMPTS = 8
_ATTEMPTS = 6  # of a call that does not reach Triton
_RETRY_SECONDS = 6.0
_WAITING_LINE_SECONDS = 5.0
_AT_ONCE = 500  # models of the index: a tenth of a millisecond
# No model has this name, so its unload does nothing: only a Triton that is not in explicit mode
# refuses it.
_NO_MODEL = "triton-adapter asks whether models can be unloaded"
_ENTRY = 0x0A  # tag of field 1 of the index, an entry
_NAME = b"\x0a"  # tag of field 1 of an entry, its name
_LENGTHS = (1, 2, 3, 4)  # bytes of the length of an entry: up to 256 MiB


class TritonControl:
    """Makes control calls. Every call has a time limit; every failure is an AdapterError.

    With `payload`, loads carry all files of the model, for a Triton that does not see the staged
    folders. Such models are in no index (seen on 2.51), so Triton is asked for each of them, and a
    model counts as gone once Triton knows no config of it; its memory may be freed a little later.
    """

    def __init__(
        self,
        faults: Faults,
        *,
        load_timeout_seconds: float,
        call_timeout_seconds: float = _CALL_SECONDS,
        on_retry: Callable[[str], None] = lambda _: None,
        on_live: Callable[[bool], None] = lambda _: None,  # Triton stops or resumes to answer
        payload: Callable[[TritonName], Payload] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        # the result of the last probe of `monitor`; False as soon as the connection breaks
        self.live = False
        self.version = ""  # as Triton reported when it became live
        # the reason for which Triton takes no loads and unloads, asked when it became live
        self.why_not_explicit: str | None = None
        self.lives = 0  # how often it became live
        self.answers = 0  # probes that it answered
        self._breaks = 0
        self._payload = payload
        self._uploaded: set[TritonName] = set()
        self._faults = faults
        self._load_timeout = load_timeout_seconds
        self._timeout = call_timeout_seconds
        self._on_retry = on_retry
        self._on_live = on_live
        self._tracing = tracing
        self._client: ControlClient | None = None
        self._listing = SharedIndex(self._ask_index)
        self.address: str | None = None  # None before `connect`
        self._why_not_live = ""
        self._silent_since = 0.0

    def connect(self, address: str) -> None:
        """Set the address, `host:port` or `unix:/path`. grpc connects at the first call."""
        self.address = address
        self._client = ControlClient(address)

    async def close(self) -> None:
        """Close the connection. Calls are refused from now on, and a retried one ends."""
        client = self._client
        self._client = None
        self.live = False
        if client is not None:
            await client.close()

    async def load(self, name: TritonName, model_id: ModelId) -> None:
        """Load the model; return when Triton serves it.

        A load cannot be cancelled: after BackendTimeout Triton continues it. Raises LoadFailed and
        OutOfMemory, and InvalidRequest for an upload that would replace a model of Triton's own.
        """
        upload: dict[str, Any] = {}
        if self._payload is not None:
            payload = await UNPACKS.run(self._payload, name)
            upload = {"config": payload.config, "files": payload.files}
            await self._unload_earlier(name, model_id)
            self._uploaded.add(name)
        await self._call(
            "load_model", name, timeout=self._load_timeout, about=(name, model_id), **upload
        )

    async def warm_up(self, name: TritonName, model_id: ModelId, seconds: float) -> str | None:
        """Have the model compute zeros once; return why it was not asked to, None where it was.

        Raises as an inference does, and InvalidRequest where no zeros can be made of its inputs.
        """
        about = (name, model_id)
        config = await self._call("get_model_config", name, timeout=self._timeout, about=about)
        if (reason := explain_no_warm_up(config)) is not None:
            return reason
        metadata = await self._call("get_model_metadata", name, timeout=self._timeout, about=about)
        try:
            request = make_zeros(name, metadata, config)
        except ValueError as error:
            raise InvalidRequest(f"no zeros can be made: {error}", model_id=model_id) from error
        await self._call("infer_once", request, timeout=seconds, about=about)
        return None

    async def gpu_bytes(self, name: TritonName) -> GpuBytes:
        """Return the bytes that the model takes of each GPU, by CUDA's number, as Triton reports.

        That is the `memory_usage` of its statistics extension, which is empty while Triton's memory
        tracker is off.
        """
        gpu_bytes: dict[int, int] = {}
        answer = await self._call("get_inference_statistics", name, timeout=_PROBE_TIMEOUT)
        for usage in (each for version in answer.model_stats for each in version.memory_usage):
            if usage.type == "GPU":
                gpu_bytes[usage.id] = gpu_bytes.get(usage.id, 0) + usage.byte_size
        return gpu_bytes

    async def unclassified(self, name: TritonName) -> Unclassified | None:
        """Return the outputs whose `classification` ends Triton; None if the call fails."""
        try:
            answer = await self._call("get_model_config", name, timeout=self._timeout)
        except AdapterError:
            return None
        outputs = answer.config.output
        strings = frozenset(each.name for each in outputs if each.data_type == TYPE_STRING)
        varying = frozenset(each.name for each in outputs if -1 in each.dims)
        return Unclassified(strings, varying)

    async def unload(self, name: TritonName, model_id: ModelId) -> None:
        """Begin to unload the model; `wait_gone` waits for the end.

        Waits for a load of the same model in progress, as Triton does.
        """
        if self._payload is not None and name in await self._read_index():
            return  # a model of Triton's own repository, not of the adapter
        try:
            await self._call(
                "unload_model",
                name,
                unload_dependents=True,
                timeout=self._load_timeout,
                about=(name, model_id),
            )
        except LoadFailed as error:  # not the fault of the caller
            raise BackendError(f"Triton did not unload: {error}", model_id=model_id) from error

    async def present(self) -> set[str]:
        """Return the names of all models that Triton has, or is loading or unloading."""
        return await self._list_in_state(_PRESENT)

    async def being_loaded(self) -> set[str]:
        """Return the names of the models that Triton is loading; uploaded models are not seen."""
        return await self._list_in_state(_LOADING)

    async def ready(self) -> set[str]:
        """Return the names of the models that Triton serves."""
        if self._payload is not None:
            return await self._select_loaded(self._uploaded)
        return await self._list_in_state(_READY)

    async def versions(self) -> Mapping[str, list[str]]:
        """Return the ready versions of each model in the index; uploaded models are not in it."""
        index = await self._read_index()
        return {
            name: [version for version, state in states.items() if state == "READY"]
            for name, states in index.items()
        }

    async def instances(self, name: TritonName) -> int:
        """Return how many instances Triton has created of the model; 0 for an ensemble."""
        answer = await self._call("get_model_config", name, timeout=self._timeout)
        groups = answer.config.instance_group
        return sum(group.count * max(1, len(group.gpus)) for group in groups)

    async def wait_gone(self, names: Collection[str], seconds: float) -> set[str]:
        """Poll until Triton has none of these models; return those that it has after `seconds`.

        The folders must stay in place meanwhile: without one a model that is still alive is
        missing from the index (docs/design/triton.md, Loads and unloads).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        pause = _POLL_FIRST_SECONDS
        while remaining := await self._select_present(names):
            if loop.time() + pause > deadline:
                return remaining
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _POLL_LAST_SECONDS)
        self._uploaded.difference_update(names)
        return set()

    async def unload_uploaded(self) -> None:
        """Unload uploaded models at the stop of the adapter: a later run would not know of them."""
        # without Triton its models are gone as well
        with suppress(AdapterError, TimeoutError):
            async with asyncio.timeout(min(self._timeout, _LAST_SECONDS)):
                for name in [*self._uploaded]:
                    await self.unload(name, ModelId(name))

    async def _select_present(self, names: Collection[str]) -> set[str]:
        """Return those of `names` that Triton has, or is loading or unloading."""
        if self._payload is not None:
            return await self._select_loaded(names)
        index = await self._listing.read()
        if not select_in_state(index, names, _PRESENT):
            return set()
        return await _parse_names(index, _PRESENT) & set(names)

    async def _select_loaded(self, names: Collection[str]) -> set[str]:
        """Return the uploads of `names` that are loaded; models in the index are Triton's own."""
        return {
            name
            for name in set(names) - (await self._read_index()).keys()
            if await self._call("has_model", name, timeout=self._timeout)
        }

    async def _unload_earlier(self, name: TritonName, model_id: ModelId) -> None:
        """Unload an earlier upload: Triton would answer OK and keep its files (seen on 2.51).

        Raises InvalidRequest if Triton's own repository has a model of this name.
        """
        if name in await self._read_index():
            raise InvalidRequest(
                f"Triton's own repository has a model {name!r}, which an upload would replace",
                model_id=model_id,
            )
        if await self._select_loaded({name}):  # left behind by a run that was killed
            await self.unload(name, model_id)
            if await self.wait_gone({name}, self._timeout):
                raise BackendTimeout(
                    f"Triton does not release an earlier {name!r}", model_id=model_id
                )

    async def _list_in_state(self, states: frozenset[str]) -> set[str]:
        """Return the models with a version in one of `states`."""
        return await _parse_names(await self._listing.read(), states)

    async def _read_index(self) -> dict[str, dict[str, str]]:
        """Return the states by name and version; the version of a never loaded model is empty."""
        index: dict[str, dict[str, str]] = {}
        for model in pb.RepositoryIndexResponse.FromString(await self._listing.read()).models:
            index.setdefault(model.name, {})[model.version] = model.state
        return index

    async def _ask_index(self) -> bytes:
        """Return an unparsed RepositoryIndexResponse.

        Triton reads its repository for the index, and fails when a folder is removed meanwhile
        ("failed to stat file", seen on 2.51), as by the unload of another model; so it is retried.
        """
        for attempt in range(_INDEX_ATTEMPTS):
            try:
                return bytes(await self._call("repository_index_bytes", timeout=self._timeout))
            except LoadFailed as error:
                failure = error
            await asyncio.sleep(_POLL_FIRST_SECONDS * attempt)
        raise BackendError(f"Triton does not list its models: {failure}") from failure

    async def wait_live(self, seconds: float) -> None:
        """Poll until Triton is live; log what is waited for at once and every few seconds.

        Raises BackendUnavailable with the last reason after `seconds`.
        """
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        next_line = started_at
        while not await self._probe():
            where = f"gRPC {self.address}"
            waited = loop.time() - started_at
            if waited > seconds:
                raise BackendUnavailable(
                    f"Triton was not live within {seconds:g} s, {where}: {self._why_not_live}",
                    delivered=False,
                )
            if loop.time() >= next_line:
                next_line += _WAITING_LINE_SECONDS
                fields = {"for": where, "seconds": round(waited, 1), "limit_seconds": seconds}
                log.info("triton.awaited", extra={**fields, "reason": self._why_not_live})
            await asyncio.sleep(0.1)

    async def monitor(self) -> NoReturn:
        """Probe for ever, and update `live` and `lives`.

        The connection is watched too: a Triton that restarts quickly answers every probe, though it
        has lost its models.
        """
        watch = background.forever(self._watch_connection, seconds=_PROBE_SECONDS)
        watching = background.begin("triton-connection-watch", watch)
        try:
            await background.forever(self._probe, seconds=_PROBE_SECONDS)
        finally:
            background.end(watching)

    async def _watch_connection(self) -> NoReturn:
        """Mark Triton as not live whenever the connection breaks."""
        while True:
            await self._require_client().wait_broken()
            self._breaks += 1
            self._update(is_live=False)

    async def _probe(self) -> bool:
        """Ask Triton whether it is live, and update `live`; return that."""
        is_live = False
        self._why_not_live = "it says that it is not live"
        breaks = self._breaks
        client = self._require_client()
        try:
            is_live = bool(await client.is_server_live(client_timeout=_PROBE_TIMEOUT))
        except InferenceServerException as error:
            self._why_not_live = error.message() or "no answer"
        if is_live and not self.live:
            self.version = await self._ask_version()
            self.why_not_explicit = await self._ask_mode()
        # an answer from before a break says nothing of the Triton that is there now
        self._update(is_live=is_live and breaks == self._breaks)
        return self.live

    async def _ask_version(self) -> str:
        """Return the version that Triton reports; "" without an answer."""
        client = self._require_client()
        try:
            metadata = await client.get_server_metadata(client_timeout=_PROBE_TIMEOUT)
        except InferenceServerException:
            return ""
        return str(metadata.version)

    async def _ask_mode(self) -> str | None:
        """Return why Triton takes no loads and unloads; None if it takes them, or does not say."""
        refusal = ""
        try:
            await self._require_client().unload_model(_NO_MODEL, client_timeout=_PROBE_TIMEOUT)
        except InferenceServerException as error:
            refusal = error.message() or ""
        if not is_not_explicit(refusal):
            return None
        log.error("triton.not_explicit", extra={"reason": NOT_EXPLICIT})
        return NOT_EXPLICIT

    def _update(self, *, is_live: bool) -> None:
        """Record the result of a probe, and report a change."""
        was_live = self.live
        self.live = is_live
        self.answers += is_live
        self.lives += is_live and not was_live
        if was_live and not is_live:
            self._silent_since = clock.monotonic()
            log.warning("triton.unreachable")
            self._on_live(False)  # noqa: FBT003 - the callback has no other argument
        elif is_live and self._silent_since:
            seconds = clock.monotonic() - self._silent_since
            self._silent_since = 0.0
            log.info("triton.reachable", extra={"seconds": round(seconds, 3)})
            self._on_live(True)  # noqa: FBT003

    def _require_client(self) -> "ControlClient":
        """Return the client. Only for callers that run between `connect` and `close`."""
        assert self._client is not None  # noqa: S101 - connect() comes first
        return self._client

    async def _call(
        self,
        method: str,
        *args: Any,
        timeout: float,  # noqa: ASYNC109 - Triton's own, on the wire
        about: tuple[TritonName, ModelId] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method of the client, and again while the calls do not reach Triton.

        Calls about a model are traced. Raises an AdapterError in place of Triton's.
        """
        model_id = about[1] if about else None

        async def call_once() -> Any:
            if self._client is None:
                raise BackendUnavailable("the adapter is starting or stopping", delivered=False)
            started_at = clock.monotonic()
            code = "OK"
            try:
                call = getattr(self._client, method)
                return await call(*args, client_timeout=timeout, **kwargs)
            except InferenceServerException as error:
                code = (error.status() or "UNKNOWN").removeprefix("StatusCode.")
                text = error.message() or ""
                raise self._explain_failure(method, code, text, about) from error
            finally:
                seconds = round(clock.monotonic() - started_at, 4)
                fields = {"method": method, "code": code, "seconds": seconds}
                if model_id is not None:
                    fields["model_id"] = model_id
                log.debug("triton.called", extra=fields)

        retries = build_retries(lambda: self._on_retry(method))
        if self._tracing is None or model_id is None or method not in _SPANS:
            return await retries(call_once)
        with self._tracing.client(*_SPANS[method], model_id):
            kwargs["headers"] = self._tracing.passed_on({})
            return await retries(call_once)

    def _explain_failure(
        self, method: str, code: str, text: str, about: tuple[TritonName, ModelId] | None
    ) -> AdapterError:
        """Return the adapter's error for a failed call of a method."""
        name, model_id = about or (None, None)
        if method == "infer_once" and about is not None:
            return self._faults.explain_grpc_inference(code, text, name=about[0], model_id=about[1])
        return self._faults.explain_control(code, text, name=name, model_id=model_id)


# -- the connection ------------------------------------------------------------------------------


class ControlClient(InferenceServerClient):  # type: ignore[misc]  # tritonclient has no types
    """Adds to tritonclient options for its channel, and calls whose answers are not parsed."""

    def __init__(self, address: str, keepalive: ChannelOptions = _KEEPALIVE) -> None:
        """Set the address, `host:port` or `unix:/path`. grpc connects at the first call."""
        super().__init__(address, channel_args=[*_CHANNEL, *keepalive])

    async def wait_broken(self) -> None:
        """Wait for the end of the connection: the present one, otherwise the next."""
        ready = grpc.ChannelConnectivity.READY
        while (state := self._channel.get_state()) is not ready:
            await self._channel.wait_for_state_change(state)
        await self._channel.wait_for_state_change(ready)

    async def repository_index_bytes(self, client_timeout: float) -> bytes:
        """Return the unparsed answer: parsing a long list costs more than all else."""
        ask = self._channel.unary_unary(f"{_SERVICE}/RepositoryIndex")
        try:
            return bytes(await ask(b"", timeout=client_timeout))
        except grpc.aio.AioRpcError as error:
            raise InferenceServerException(error.details(), str(error.code())) from error

    async def has_model(self, name: str, client_timeout: float) -> bool:
        """Return whether the model is loaded, by its config.

        ModelReady does not say so: since 2.67 it is False for a model whose own `is_ready` returns
        False, and for one whose process has died.
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
        ask = self._channel.unary_unary(f"{_SERVICE}/ModelInfer")
        message = request.SerializeToString()
        metadata = tuple((headers or {}).items())
        try:
            await ask(message, timeout=client_timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise InferenceServerException(error.details(), str(error.code())) from error


def _should_retry(error: BaseException) -> bool:
    """Return whether the call never reached Triton; one that did may be what killed it."""
    return isinstance(error, BackendUnavailable) and not error.delivered


def build_retries(
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
        retry=retry_if_exception(_should_retry),
        stop=stop_after_attempt(_ATTEMPTS) | stop_after_delay(_RETRY_SECONDS),
        wait=wait_random_exponential(multiplier=wait_seconds, max=2.0),
        before_sleep=count,
        reraise=True,
    )


# -- the index -----------------------------------------------------------------------------------


class SharedIndex:
    """Shares the answers of `ask`: all that want one during a call share the next.

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
        self._current = self._next
        self._next = None
        try:
            return await self._ask()
        finally:
            if self._current is asyncio.current_task():
                self._current = None


def select_in_state(
    index: bytes,  # a serialised RepositoryIndexResponse
    names: Collection[str],
    states: Collection[str],
) -> set[str]:
    """Return those of `names` that have a version in one of `states`."""
    return {
        name for name in names if any(entry.state in states for entry in _find_entries(index, name))
    }


def _find_entries(index: bytes, name: str) -> Iterator[pb.RepositoryIndexResponse.ModelIndex]:
    """Yield the entries of that name, also false matches within the text of other entries."""
    raw = name.encode()
    mark = _NAME + _encode_varint(len(raw)) + raw
    at = index.find(mark)
    while at >= 0:
        for size in _LENGTHS:
            begin = at - size
            if begin >= 1 and index[begin - 1] == _ENTRY and _is_varint(index[begin:at]):
                yield from _parse_entry(index[at : at + _read_varint(index[begin:at])], name)
        at = index.find(mark, at + 1)


def _parse_entry(entry: bytes, name: str) -> Iterator[pb.RepositoryIndexResponse.ModelIndex]:
    """Yield the entry if the bytes are one, and its name is this one."""
    try:
        model = pb.RepositoryIndexResponse.ModelIndex.FromString(entry)
    except DecodeError:
        return
    if model.name == name:
        yield model


def _encode_varint(number: int) -> bytes:
    """Encode a number as protobuf does: seven bits a byte, the lowest first."""
    out = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits a byte
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _read_varint(raw: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(raw))


def _is_varint(raw: bytes) -> bool:
    return raw[-1] < 0x80 and all(byte >= 0x80 for byte in raw[:-1])  # noqa: PLR2004


async def _parse_names(index: bytes, states: frozenset[str]) -> set[str]:
    """Return the models of an index with a version in one of `states`. Yields to the loop."""
    models = pb.RepositoryIndexResponse.FromString(index).models
    names = set()
    for start in range(0, len(models), _AT_ONCE):
        piece = models[start : start + _AT_ONCE]
        names |= {model.name for model in piece if model.state in states}
        await asyncio.sleep(0)
    return names
