"""A request's body, within a limit."""

from collections.abc import AsyncIterator

from aiohttp import ClientError, web

from adapter.errors import InvalidRequest, PayloadTooLarge


def _chunks(request: web.BaseRequest, limit: int) -> AsyncIterator[bytes]:
    """As they arrive. PayloadTooLarge at once, or before the first byte too many."""
    known = request.content_length
    if known is not None and known > limit:
        raise PayloadTooLarge(f"the body has {known} bytes; at most {limit} are accepted")
    return _counted(request, limit)


async def whole_body(request: web.BaseRequest, limit: int) -> bytes:
    return b"".join([chunk async for chunk in _chunks(request, limit)])


async def _counted(request: web.BaseRequest, limit: int) -> AsyncIterator[bytes]:
    seen = 0
    try:
        async for chunk in request.content.iter_any():
            seen += len(chunk)
            if seen > limit:
                raise PayloadTooLarge(f"the body has more than {limit} bytes")
            yield chunk
    except (ConnectionError, ClientError, web.RequestPayloadError) as error:
        raise InvalidRequest(f"the body broke off after {seen} bytes") from error
