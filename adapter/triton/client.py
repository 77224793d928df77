"""Makes Triton's control calls through tritonclient over gRPC.

Over gRPC because a load over Triton's HTTP port stops every inference on that port for as long as
it takes, and each gRPC load gets a thread of its own (docs/design/triton.md, Loads and unloads).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from math import prod
from typing import Any, NoReturn

from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.model_config_pb2 import TYPE_STRING
from tritonclient.utils import InferenceServerException

from adapter.core.byte_sizes import format_size
from adapter.core.memory import GpuBytes
from adapter.core.model import ModelId, Payload, TritonName
from adapter.core.tensors import SIZES
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
from adapter.triton.control_client import ControlClient, SharedIndex, control_retries, in_state

log = logging.getLogger(__name__)

_SPANS = {
    method: (name, {"rpc.system.name": "grpc", "rpc.method": name})
    for method, name in {
        "load_model": "inference.GRPCInferenceService/RepositoryModelLoad",
        "unload_model": "inference.GRPCInferenceService/RepositoryModelUnload",
        "infer_once": "inference.GRPCInferenceService/ModelInfer",
    }.items()
}
_READY, _LOADING = frozenset({"READY"}), frozenset({"LOADING"})
_PRESENT = _READY | {"LOADING", "UNLOADING"}
_POLL_FIRST_SECONDS, _POLL_LAST_SECONDS = 0.01, 0.1
_PROBE_SECONDS, _PROBE_TIMEOUT = 0.5, 2.0
_CALL_SECONDS = 10.0  # of a control call that loads and unloads nothing, such as an index
_LAST_SECONDS = 4.0  # for unloading uploaded models at the stop
_INDEX_ATTEMPTS = 8
_WAITING_LINE_SECONDS = 5.0
_AT_ONCE = 500  # models of the index: a tenth of a millisecond
# No model has this name, so its unload does nothing: only a Triton that is not in explicit mode
# refuses it.
_NO_MODEL = "triton-adapter asks whether models can be unloaded"
# Bytes of one element; an element of BYTES is its length, 0, and nothing.
_ELEMENT_BYTES = {**SIZES, "BF16": 2, "BYTES": 4}
# Of the inference of zeros, which the event loop copies; the others wait as long.
_MOST_BYTES = 64 * 2**20


class TritonControl:
    """Makes control calls. Every call has a time limit; every failure is an AdapterError.

    With `payload`, loads carry all files of the model, for a Triton that does not see the staged
    folders. Such models are in no index (seen on 2.51), so they are queried one by one, and a model
    counts as gone once Triton knows no config of it; its memory may be freed a little later.
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
        # why Triton takes no loads and unloads, as it said when it became live; None: it takes them
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
        client, self._client, self.live = self._client, None, False
        if client is not None:
            await client.close()

    async def load(self, name: TritonName, model_id: ModelId) -> None:
        """Load the model; return when Triton serves it.

        A load cannot be cancelled: after BackendTimeout it goes on in Triton.
        """
        carried: dict[str, Any] = {}
        if self._payload is not None:
            given = await UNPACKS.run(self._payload, name)
            carried = {"config": given.config, "files": given.files}
            await self._unload_earlier(name, model_id)
            self._uploaded.add(name)
        await self._call(
            "load_model", name, timeout=self._load_timeout, about=(name, model_id), **carried
        )

    async def warm_up(self, name: TritonName, model_id: ModelId, seconds: float) -> str | None:
        """Have the model compute zeros once; return why it was not asked to, None where it was.

        Raises as an inference does, and InvalidRequest where no zeros can be made of its inputs.
        """
        about = (name, model_id)
        config = await self._call("get_model_config", name, timeout=self._timeout, about=about)
        if (reason := why_not(config)) is not None:
            return reason
        asked = await self._call("get_model_metadata", name, timeout=self._timeout, about=about)
        try:
            request = zeros(name, asked, config)
        except ValueError as error:
            raise InvalidRequest(f"no zeros can be made: {error}", model_id=model_id) from error
        await self._call("infer_once", request, timeout=seconds, about=about)
        return None

    async def gpu_bytes(self, name: TritonName) -> GpuBytes:
        """Return what Triton reports that the versions of the model take of each GPU, by CUDA's
        number: the `memory_usage` of its statistics extension, where its memory tracker is on.
        """
        found: dict[int, int] = {}
        told = await self._call("get_inference_statistics", name, timeout=_PROBE_TIMEOUT)
        for usage in (each for model in told.model_stats for each in model.memory_usage):
            if usage.type == "GPU":
                found[usage.id] = found.get(usage.id, 0) + usage.byte_size
        return found

    async def unclassified(self, name: TritonName) -> Unclassified | None:
        """Return the outputs whose `classification` ends Triton; None where it does not tell."""
        try:
            found = await self._call("get_model_config", name, timeout=self._timeout)
        except AdapterError:
            return None
        outputs = found.config.output
        strings = frozenset(each.name for each in outputs if each.data_type == TYPE_STRING)
        varying = frozenset(each.name for each in outputs if -1 in each.dims)
        return Unclassified(strings, varying)

    async def unload(self, name: TritonName, model_id: ModelId) -> None:
        """Begin to unload the model; `wait_gone` waits for the end.

        Waits for a load of the same model in progress, as Triton does.
        """
        if self._payload is not None and name in await self._index():
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
        return await self._in_state(_PRESENT)

    async def being_loaded(self) -> set[str]:
        """Return the names of the models that Triton is loading; uploaded models are not seen."""
        return await self._in_state(_LOADING)

    async def ready(self) -> set[str]:
        if self._payload is not None:
            return await self._still_loaded(self._uploaded)
        return await self._in_state(_READY)

    async def versions(self) -> Mapping[str, list[str]]:
        """Return the ready versions of each model in the index; uploaded models are not in it."""
        index = await self._index()
        return {n: [v for v, state in s.items() if state == "READY"] for n, s in index.items()}

    async def instances(self, name: TritonName) -> int:
        """Return how many instances Triton has created of the model; 0 for an ensemble."""
        found = await self._call("get_model_config", name, timeout=self._timeout)
        groups = found.config.instance_group
        return sum(group.count * max(1, len(group.gpus)) for group in groups)

    async def wait_gone(self, names: Collection[str], seconds: float) -> set[str]:
        """Poll until none of these models is left; return those that still are after `seconds`.

        The folders must stay in place meanwhile: without one a model that is still alive is
        missing from the index (docs/design/triton.md, Loads and unloads).
        """
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + seconds, _POLL_FIRST_SECONDS
        while left := await self._left(names):
            if loop.time() + pause > deadline:
                return left
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _POLL_LAST_SECONDS)
        self._uploaded.difference_update(names)
        return set()

    async def unload_uploaded(self) -> None:
        """Unload uploaded models at the stop of the adapter: a later run would not know of them."""
        with suppress(AdapterError, TimeoutError):  # without Triton its models are gone as well
            async with asyncio.timeout(min(self._timeout, _LAST_SECONDS)):
                for name in [*self._uploaded]:
                    await self.unload(name, ModelId(name))

    async def _left(self, names: Collection[str]) -> set[str]:
        if self._payload is not None:
            return await self._still_loaded(names)
        listed = await self._listing.read()
        if not in_state(listed, names, _PRESENT):
            return set()
        return await self._names(listed, _PRESENT) & set(names)

    async def _still_loaded(self, names: Collection[str]) -> set[str]:
        """Return the uploads of `names` that are loaded; models in the index are Triton's own."""
        return {
            name
            for name in set(names) - (await self._index()).keys()
            if await self._call("has_model", name, timeout=self._timeout)
        }

    async def _unload_earlier(self, name: TritonName, model_id: ModelId) -> None:
        """Unload an earlier upload: Triton would answer OK and keep its files (seen on 2.51)."""
        if name in await self._index():
            raise InvalidRequest(
                f"Triton's own repository has a model {name!r}, which an upload would replace",
                model_id=model_id,
            )
        if await self._still_loaded({name}):  # left by an earlier run that was killed
            await self.unload(name, model_id)
            if await self.wait_gone({name}, self._timeout):
                raise BackendTimeout(
                    f"Triton does not release an earlier {name!r}", model_id=model_id
                )

    async def _in_state(self, states: frozenset[str]) -> set[str]:
        return await self._names(await self._listing.read(), states)

    async def _names(self, listed: bytes, states: frozenset[str]) -> set[str]:
        """Return the models with a version in one of `states`. Yields to the event loop."""
        models, names = pb.RepositoryIndexResponse.FromString(listed).models, set()
        for start in range(0, len(models), _AT_ONCE):
            piece = models[start : start + _AT_ONCE]
            names |= {model.name for model in piece if model.state in states}
            await asyncio.sleep(0)
        return names

    async def _index(self) -> dict[str, dict[str, str]]:
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

        BackendUnavailable with the last reason after `seconds`.
        """
        loop = asyncio.get_running_loop()
        begun = next_line = loop.time()
        while not await self._probe():
            where, waited = f"gRPC {self.address}", loop.time() - begun
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
        while True:
            await self._connected().wait_broken()
            self._breaks += 1
            self._update(is_live=False)

    async def _probe(self) -> bool:
        is_live, self._why_not_live = False, "it says that it is not live"
        breaks = self._breaks
        try:
            is_live = bool(await self._connected().is_server_live(client_timeout=_PROBE_TIMEOUT))
        except InferenceServerException as error:
            self._why_not_live = error.message() or "no answer"
        if is_live and not self.live:
            self.version = await self._reported_version()
            self.why_not_explicit = await self._ask_mode()
        # an answer from before a break says nothing of the Triton that is there now
        self._update(is_live=is_live and breaks == self._breaks)
        return self.live

    async def _reported_version(self) -> str:
        try:
            said = await self._connected().get_server_metadata(client_timeout=_PROBE_TIMEOUT)
        except InferenceServerException:
            return ""
        return str(said.version)

    async def _ask_mode(self) -> str | None:
        """Return why Triton takes no loads and unloads; None if it takes them, or does not say."""
        refusal = ""
        try:
            await self._connected().unload_model(_NO_MODEL, client_timeout=_PROBE_TIMEOUT)
        except InferenceServerException as error:
            refusal = error.message() or ""
        if not is_not_explicit(refusal):
            return None
        log.error("triton.not_explicit", extra={"reason": NOT_EXPLICIT})
        return NOT_EXPLICIT

    def _update(self, *, is_live: bool) -> None:
        was, self.live = self.live, is_live
        self.answers += is_live
        self.lives += is_live and not was
        if was and not is_live:
            self._silent_since = clock.monotonic()
            log.warning("triton.unreachable")
            self._on_live(False)  # noqa: FBT003 - the only thing that it says
        elif is_live and self._silent_since:
            seconds, self._silent_since = clock.monotonic() - self._silent_since, 0.0
            log.info("triton.reachable", extra={"seconds": round(seconds, 3)})
            self._on_live(True)  # noqa: FBT003

    def _connected(self) -> ControlClient:
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
        model_id = about[1] if about else None

        async def once() -> Any:
            if self._client is None:
                raise BackendUnavailable("the adapter is starting or stopping", delivered=False)
            begun, code = clock.monotonic(), "OK"
            try:
                call = getattr(self._client, method)
                return await call(*args, client_timeout=timeout, **kwargs)
            except InferenceServerException as error:
                code = (error.status() or "UNKNOWN").removeprefix("StatusCode.")
                text = error.message() or ""
                raise self._failure(method, code, text, about) from error
            finally:
                seconds = round(clock.monotonic() - begun, 4)
                fields = {"method": method, "code": code, "seconds": seconds}
                if model_id is not None:
                    fields["model_id"] = model_id
                log.debug("triton.called", extra=fields)

        retried = control_retries(lambda: self._on_retry(method))
        if self._tracing is None or model_id is None or method not in _SPANS:
            return await retried(once)
        with self._tracing.client(*_SPANS[method], model_id):
            kwargs["headers"] = self._tracing.passed_on({})
            return await retried(once)

    def _failure(
        self, method: str, code: str, text: str, about: tuple[TritonName, ModelId] | None
    ) -> AdapterError:
        name, model_id = about or (None, None)
        if method == "infer_once" and about is not None:
            return self._faults.explain_grpc_inference(code, text, name=about[0], model_id=about[1])
        return self._faults.explain_control(code, text, name=name, model_id=model_id)


def why_not(config: pb.ModelConfigResponse) -> str | None:
    """Return why a lone inference of zeros proves nothing about such a model, or cannot be made."""
    model = config.config
    if any(sample.batch_size for sample in model.model_warmup):  # Triton passes the others over
        return "Triton has run the model_warmup of its config.pbtxt"
    if model.HasField("sequence_batching"):
        return "it has sequence batching: a request belongs to a sequence"
    if model.model_transaction_policy.decoupled:
        return "it is decoupled: a request may have any number of responses, or none"
    return None


def zeros(
    name: str, metadata: pb.ModelMetadataResponse, config: pb.ModelConfigResponse
) -> pb.ModelInferRequest:
    """Return an inference of zeros, and of empty strings, for all inputs that are not optional.
    Dimensions that vary are 1. ValueError for a data type that is not known, or for inputs that
    take too many bytes.
    """
    taken = 0
    optional = {each.name for each in config.config.input if each.optional}
    request = pb.ModelInferRequest(model_name=name)
    for tensor in metadata.inputs:
        if tensor.name in optional:
            continue
        if (size := _ELEMENT_BYTES.get(tensor.datatype)) is None:
            raise ValueError(f"its input {tensor.name!r} is of the type {tensor.datatype!r}")
        shape = [1 if dimension < 0 else dimension for dimension in tensor.shape]
        taken += size * prod(shape)
        if taken > _MOST_BYTES:
            most = format_size(_MOST_BYTES)
            raise ValueError(
                f"its inputs take {format_size(taken)} at least; {most} are sent at most"
            )
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(bytes(size * prod(shape)))
    return request
