"""Headers, bodies and answers on their way between a V2 caller and Triton."""

from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
from aiohttp import web

from adapter.core.infer import V2Answer
from adapter.frontends.body import body_chunks
from adapter.frontends.http import echo

# Bodies up to this size are taken whole: one write each way instead of a stream.
_WHOLE_BYTES = 2**20

# They concern one connection, not the call (RFC 9110 section 7.6.1), or are written anew.
_OF_THE_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "expect", "content-length"),
    }
)

Rename = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Without those that concern one connection only."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    dropped = _OF_THE_CONNECTION | named
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


def call_headers(request: web.BaseRequest, *, is_rewritten: bool) -> dict[str, str]:
    """`is_rewritten`: names in the answer will have to be put back, so it must not be packed."""
    headers = passed_on(request.headers)
    if is_rewritten:
        headers = {name: v for name, v in headers.items() if name.lower() != "accept-encoding"}
    return {
        name: value.lower() if name.lower() == "content-encoding" else value  # Triton knows no GZIP
        for name, value in headers.items()
    }


async def call_body(
    request: web.BaseRequest, headers: dict[str, str], limit: int
) -> bytes | AsyncIterator[bytes]:
    """Whole when small, else a stream, whose length goes into `headers` where it is known."""
    length, chunks = request.content_length, body_chunks(request, limit)
    if length is None:
        return chunks
    headers["Content-Length"] = str(length)
    if length > _WHOLE_BYTES:
        return chunks
    return b"".join([chunk async for chunk in chunks])


async def relay(
    request: web.BaseRequest, found: V2Answer, rename: Rename | None = None
) -> web.StreamResponse:
    """Triton's answer as it came, each piece as soon as it is there."""
    headers, length = passed_on(found.headers), found.content_length
    if rename is None and length is not None and length <= _WHOLE_BYTES:
        return web.Response(status=found.status, headers=headers, body=await found.read())
    response = web.StreamResponse(status=found.status, headers=headers)
    response.content_length = length if rename is None else None
    echo(request, response)
    await response.prepare(request)
    try:
        async for chunk in found.chunks() if rename is None else rename(found.chunks()):
            await response.write(chunk)
    except (aiohttp.ClientError, TimeoutError) as error:
        # The status is out. This closes the connection, which tells that there was more to come.
        raise ConnectionResetError("the answer broke off") from error
    await response.write_eof()
    return response
