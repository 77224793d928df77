"""Calls of Triton's HTTP port: bytes in, Triton, bytes out. No tensors, no JSON of ours."""

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import aiohttp

from adapter.core.faults import Faults
from adapter.core.infer import InferRequest, V2Call
from adapter.core.model import ModelId, TritonName
from adapter.core.registry import ModelRecord
from adapter.errors import AdapterError, BackendTimeout, BackendUnavailable

# What a caller may tell Triton; everything else of a request stays here.
_FORWARDED = ("Content-Type", "Content-Encoding", "Accept-Encoding", "traceparent", "tracestate")

HEADER_LENGTH = "Inference-Header-Content-Length"

_OK = 200
_EVENT = "data: "  # generate_stream tells an error as its first event
_CONNECT_SECONDS = 5
_MAX_ERROR_BYTES = 4 * 2**20


class HttpAnswer:
    """InferAnswer and V2Answer over a response of Triton's HTTP port."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.content_length = response.content_length
        self.headers = response.headers
        header = response.headers.get(HEADER_LENGTH)
        self.json_header_bytes = None if header is None else int(header)
        self._response = response

    async def read(self) -> bytes:
        return await self._response.read()

    def chunks(self) -> AsyncIterator[bytes]:
        return self._response.content.iter_any()


class HttpDataPlane:
    def __init__(self, faults: Faults, *, timeout_seconds: float) -> None:
        self._faults = faults
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=_CONNECT_SECONDS)
        self._stream_timeout = aiohttp.ClientTimeout(
            sock_read=timeout_seconds, sock_connect=_CONNECT_SECONDS
        )
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None
        self._base = ""

    def connect(self, address: str) -> None:
        """`host:port` of Triton's HTTP port."""
        self._base = f"http://{address}/v2"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=300),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def infer(
        self, record: ModelRecord, request: InferRequest
    ) -> AbstractAsyncContextManager[HttpAnswer]:
        """Yield Triton's answer; whatever is no good answer is raised as one of our errors."""
        path = f"/models/{record.name}/infer"
        return self.forward(V2Call("POST", path, _headers(record, request), request.body), record)

    @asynccontextmanager
    async def forward(self, call: V2Call, record: ModelRecord | None) -> AsyncIterator[HttpAnswer]:
        model_id = record.id if record else None
        if self._session is None:
            raise BackendUnavailable("Triton is not up yet", model_id=model_id, delivered=False)
        try:
            async with self._session.request(
                call.method,
                self._base + call.path,
                data=call.body,
                headers=call.headers,
                timeout=self._stream_timeout if call.is_stream else self._timeout,
            ) as response:
                if response.status != _OK and not call.is_probe:
                    raise await self._fault(response, record)
                yield HttpAnswer(response)
        except TimeoutError as error:
            raise BackendTimeout(
                f"no answer from Triton within {self._timeout_seconds:g} s", model_id=model_id
            ) from error
        except aiohttp.ClientError as error:
            if isinstance(error.__cause__, AdapterError):  # our own refusal of the body's stream
                raise error.__cause__ from None
            delivered = not isinstance(error, aiohttp.ClientConnectorError)
            raise BackendUnavailable(
                f"Triton cannot be reached: {error}", model_id=model_id, delivered=delivered
            ) from error

    async def _fault(
        self, response: aiohttp.ClientResponse, record: ModelRecord | None
    ) -> AdapterError:
        raw = b""
        while len(raw) < _MAX_ERROR_BYTES and (piece := await response.content.readany()):
            raw += piece
        text = raw.decode("utf-8", "backslashreplace").removeprefix(_EVENT)
        with suppress(ValueError, TypeError, KeyError):  # any other shape: the raw text says most
            text = str(json.loads(text)["error"])
        return self._faults.of_inference(
            response.status,
            response.headers.get("Content-Type", ""),
            text,
            name=record.name if record else TritonName(""),
            model_id=record.id if record else ModelId(""),
        )


def _headers(record: ModelRecord, request: InferRequest) -> dict[str, str]:
    headers = {h: request.headers[h] for h in _FORWARDED if h in request.headers}
    if "Content-Encoding" in headers:
        headers["Content-Encoding"] = headers["Content-Encoding"].lower()  # Triton knows no GZIP
    if request.json_header_bytes is not None:
        headers[HEADER_LENGTH] = str(request.json_header_bytes)
    if request.content_length is not None:
        headers["Content-Length"] = str(request.content_length)
    if record.is_renamed:
        # the answer names the model, and its name will have to be put back
        headers.pop("Accept-Encoding", None)
    return headers
