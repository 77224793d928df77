"""Payloads as the bytes of each protocol, made before the clock runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from adapter.bench.payload import Payload
from adapter.bench.plan import Protocol, Target, headers_for

_JOINED_BYTES = 65536  # below, one write of a copy costs less than two writes
_BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """HTTP: what goes onto the wire. gRPC: one message, and the metadata of this request alone."""

    parts: tuple[bytes, ...]
    headers: tuple[tuple[str, str], ...] = ()


def build(
    target: Target, model: str, payload: Payload, headers: Sequence[tuple[str, str]]
) -> Request:
    given = headers_for(headers, model)
    if target.protocol is Protocol.GRPC:
        message = payload.as_message(model)
        return Request((b"\0" + len(message).to_bytes(4) + message,), given)
    size = None
    if target.protocol in {Protocol.SAGEMAKER_JSON, Protocol.V2_JSON}:
        body = payload.as_json()
    else:
        body, size = payload.as_binary()
    lines = [*_own_headers(target.protocol, size), *given]
    return Request(_http(target, _path(target.protocol, model), lines, body))


def _path(protocol: Protocol, model: str) -> str:
    name = quote(model, safe="")
    if protocol in {Protocol.SAGEMAKER_JSON, Protocol.SAGEMAKER_BINARY}:
        return f"/models/{name}/invoke"
    return f"/v2/models/{name}/infer"


def _own_headers(protocol: Protocol, json_bytes: int | None) -> Iterable[tuple[str, str]]:
    if protocol is Protocol.SAGEMAKER_BINARY:
        yield "Content-Type", f"{_BINARY}{json_bytes}"
    elif protocol is Protocol.V2_BINARY:
        yield "Content-Type", "application/octet-stream"
        yield "Inference-Header-Content-Length", str(json_bytes)
    else:
        yield "Content-Type", "application/json"


def _http(
    target: Target, path: str, headers: Iterable[tuple[str, str]], body: bytes
) -> tuple[bytes, ...]:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {target.address.authority}\r\n{lines}"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode("latin-1")
    return (head + body,) if len(body) < _JOINED_BYTES else (head, body)
