"""Encodes payloads for each protocol, before time is measured."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from adapter.tools.bench.payload import Payload
from adapter.tools.bench.plan import Headers, Protocol, Target, differs, fresh, headers_for

_JOINED_BYTES = 65536  # below, one write of a copy costs less than two writes
_BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="
_TARGET = "X-Amzn-SageMaker-Target-Model"
_OURS = frozenset(
    {
        *("host", "content-length", "content-type", "inference-header-content-length"),
        _TARGET.lower(),
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One encoded request: for HTTP the bytes to send, for gRPC one message and its own metadata.
    `differs`: it is a template, which for HTTP has head and body as two parts.
    """

    parts: tuple[bytes, ...]
    headers: Headers = ()
    differs: bool = False


def build(
    target: Target, model: str, payload: Payload, headers: Headers, head: Headers = ()
) -> Request:
    """Encode a request. `head`: headers of a recorded one, whose order and spelling ours take."""
    if target.protocol is Protocol.GRPC:
        message = payload.as_message(model)
        own = headers_for([each for each in headers if not is_in_all(each)], model)
        is_pattern = any(differs(value) for _, value in own)
        return Request((b"\0" + len(message).to_bytes(4) + message,), own, is_pattern)
    size = None
    if target.protocol in {Protocol.SAGEMAKER_JSON, Protocol.V2_JSON, Protocol.ENDPOINT_JSON}:
        body = payload.as_json()
    else:
        body, size = payload.as_binary()
    ours = {"Host": target.address.authority, **dict(_own_headers(target.protocol, size))}
    ours["Content-Length"] = str(len(body))
    if head and not _has_type(head) and target.protocol is not Protocol.SAGEMAKER_BINARY:
        del ours["Content-Type"]  # which for that protocol has the length of the JSON
    if target.protocol is Protocol.ENDPOINT_JSON:
        ours[_TARGET] = model
    pairs = [*_merged(ours, headers_for(head, model)), *headers_for(headers, model)]
    lines = "".join(f"{name}: {value}\r\n" for name, value in pairs)
    path = _path(target.protocol, model)
    whole = f"POST {path} HTTP/1.1\r\n{lines}\r\n"
    if any(differs(value) for _, value in pairs):
        return Request((whole.encode("latin-1"), body), differs=True)
    return Request(_joined(whole.encode("latin-1"), body))


def is_in_all(header: tuple[str, str]) -> bool:
    """Return whether the header is the same in all requests; gRPC encodes such metadata once."""
    return "{model}" not in header[1] and not differs(header[1])


def renewed(request: Request) -> Request:
    """Fill in a template; any other request is returned as it is."""
    if not request.differs:
        return request
    if request.headers:
        return Request(request.parts, tuple((name, fresh(text)) for name, text in request.headers))
    head, body = request.parts
    return Request(_joined(fresh(head.decode("latin-1")).encode("latin-1"), body))


def _path(protocol: Protocol, model: str) -> str:
    name = quote(model, safe="")
    if protocol is Protocol.ENDPOINT_JSON:
        return "/endpoints/any/invocations"
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


def _merged(ours: Mapping[str, str], head: Headers) -> Iterator[tuple[str, str]]:
    left = {name.lower(): (name, value) for name, value in ours.items()}
    for name, value in head:
        key = name.lower()
        if key not in _OURS:
            yield name, value
        elif key in left:
            yield name, left.pop(key)[1]
    yield from left.values()


def _has_type(head: Headers) -> bool:
    return any(name.lower() == "content-type" for name, _ in head)


def _joined(head: bytes, body: bytes) -> tuple[bytes, ...]:
    return (head + body,) if len(body) < _JOINED_BYTES else (head, body)
