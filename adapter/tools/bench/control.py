"""Calls that are not measured: names and metadata of models, loads and unloads."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import quote

import aiohttp
import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2

from adapter.tools.bench.errors import BenchError
from adapter.tools.bench.plan import Address, Churn, Headers, Protocol, fresh, headers_for

_OK = 200
_ASK_SECONDS = 30.0
_SHOWN = 300
_METADATA = "/inference.GRPCInferenceService/ModelMetadata"


class ControlClient:
    """Calls a target over HTTP. A load or unload may take `control_seconds`."""

    def __init__(self, address: Address, headers: Headers, control_seconds: float) -> None:
        self._address = address
        self._headers = headers
        self._control_seconds = control_seconds

    async def metadata(self, model: str) -> dict[str, Any]:
        path = f"/v2/models/{quote(model, safe='')}"
        status, body = await self._ask("GET", path, model, _ASK_SECONDS)
        if status != _OK:
            raise BenchError(f"GET {path}: {status} {shown(body)}")
        return _inputs(json.loads(body), model)

    async def models(self) -> list[str]:
        names: list[str] = []
        path = "/models?limit=1000"
        while path:
            status, body = await self._ask("GET", path, "", _ASK_SECONDS)
            if status != _OK:
                raise BenchError(f"GET {path}: {status} {shown(body)}")
            page = json.loads(body)
            names += [str(each["modelName"]) for each in page["models"]]
            token = page.get("nextPageToken")
            path = f"/models?limit=1000&next_page_token={quote(token, safe='')}" if token else ""
        return names

    async def load(self, model: str, package: str) -> tuple[int, bytes]:
        body = json.dumps({"model_name": model, "url": package}).encode()
        return await self._ask("POST", "/models", model, self._control_seconds, body)

    async def unload(self, model: str) -> tuple[int, bytes]:
        path = f"/models/{quote(model, safe='')}"
        return await self._ask("DELETE", path, model, self._control_seconds)

    async def _ask(
        self, method: str, path: str, model: str, seconds: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        given = {name: fresh(value) for name, value in headers_for(self._headers, model)}
        headers = given | {"Content-Type": "application/json"}
        try:
            async with (
                aiohttp.ClientSession(
                    f"http://{self._address.authority}",
                    connector=self._connector(),
                    timeout=aiohttp.ClientTimeout(total=seconds),
                ) as session,
                session.request(method, path, data=body, headers=headers) as answer,
            ):
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            text = f"{self._address.url}{path}: {error or type(error).__name__}"
            raise BenchError(text) from error

    def _connector(self) -> aiohttp.BaseConnector:
        path = self._address.socket
        return aiohttp.UnixConnector(path) if path else aiohttp.TCPConnector()


def shown(body: bytes) -> str:
    return body.decode(errors="replace").strip()[:_SHOWN]


def _inputs(metadata: Any, model: str) -> dict[str, Any]:
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("inputs"), list):
        raise BenchError(f"the metadata of {model!r} has no inputs")
    return dict(metadata)


async def metadata_of(
    places: Sequence[tuple[Address, Protocol]], model: str, headers: Headers
) -> dict[str, Any]:
    """Return the metadata from the first address that has it, or raise the last one's error."""
    found: BenchError | None = None
    for address, protocol in places:
        try:
            if protocol is Protocol.GRPC:
                return await _metadata_grpc(address, model, headers_for(headers, model))
            return await ControlClient(address, headers, _ASK_SECONDS).metadata(model)
        except BenchError as error:
            found = error
    raise BenchError(
        f"no metadata to make a payload from: {found} (--metadata says where else to ask,"
        " --payload gives one)"
    ) from found


async def _metadata_grpc(address: Address, model: str, headers: Headers) -> dict[str, Any]:
    target = f"unix:{address.socket}" if address.socket else address.authority
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.unary_unary(
            _METADATA,
            request_serializer=service_pb2.ModelMetadataRequest.SerializeToString,
            response_deserializer=service_pb2.ModelMetadataResponse.FromString,
        )
        try:
            answer = await call(
                service_pb2.ModelMetadataRequest(name=model),
                metadata=[(name.lower(), fresh(value)) for name, value in headers],
                timeout=_ASK_SECONDS,
            )
        except grpc.aio.AioRpcError as error:
            text = f"grpc at {target}: {error.code().name} {error.details()}"
            raise BenchError(text) from error
    return _inputs(MessageToDict(answer, preserving_proto_field_name=True), model)


MODEL = "bench-churn"
_GOOD = 200


@dataclass(frozen=True, slots=True)
class Change:
    """Times are in seconds, `at` since the start of the run. `error` is empty after success."""

    at: float
    seconds: float
    operation: str
    error: str


class Churner:
    """Loads and unloads in turn, at the interval of the plan or slower."""

    def __init__(self, control: ControlClient, churn: Churn, run_started: float) -> None:
        self._control = control
        self._churn = churn
        self._run_started = run_started
        self._is_loaded = False
        self.changes: list[Change] = []

    async def run(self, stopped: asyncio.Event) -> None:
        """Run until `stopped`, then unload the model if it is loaded."""
        due = perf_counter()
        while not stopped.is_set():
            await self._change()
            due = max(perf_counter(), due + self._churn.every_seconds)
            try:
                await asyncio.wait_for(stopped.wait(), due - perf_counter())
            except TimeoutError:
                continue
        if self._is_loaded:
            await self._change()

    async def _change(self) -> None:
        operation = "unload" if self._is_loaded else "load"
        started = perf_counter()
        try:
            if self._is_loaded:
                status, body = await self._control.unload(MODEL)
            else:
                status, body = await self._control.load(MODEL, self._churn.package)
            error = "" if status == _GOOD else f"{status} {shown(body)}"
        except BenchError as unavailable:
            error = str(unavailable)
        if not error:
            self._is_loaded = not self._is_loaded
        self.changes.append(
            Change(started - self._run_started, perf_counter() - started, operation, error)
        )
