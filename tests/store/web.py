"""A web server that can be told to cut, to lie and to be slow. It speaks HTTP as aiohttp does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from tests.buckets import KEYS

Serve = Callable[["Answer"], Awaitable[web.StreamResponse]]


@dataclass
class Page:
    body: bytes
    etag: str | None = '"1"'


@dataclass
class Answer:
    """One GET and what is to be answered, as a good server would."""

    request: web.Request
    page: Page
    offset: int
    is_over: asyncio.Event

    @property
    def rest(self) -> bytes:
        return self.page.body[self.offset :]

    async def begin(self, length: int | None = None) -> web.StreamResponse:
        status, whole = 206 if self.offset else 200, len(self.page.body)
        response = web.StreamResponse(status=status, headers=headers_of(self.page))
        if self.offset:
            response.headers["Content-Range"] = f"bytes {self.offset}-{whole - 1}/{whole}"
        response.content_length = len(self.rest) if length is None else length
        await response.prepare(self.request)
        return response

    def cut(self) -> None:
        assert self.request.transport is not None
        self.request.transport.close()


def headers_of(page: Page) -> dict[str, str]:
    # what is modified in the same second has the same time
    time = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
    return time if page.etag is None else {**time, "ETag": page.etag}


@dataclass
class WebServer:
    """`pages` by path. `script` has what to do with the next GETs, one each; then all is well.
    `asked` has method, path, Range and If-Match of each request.
    """

    url: str = ""
    pages: dict[str, Page] = field(default_factory=dict)
    script: list[Serve] = field(default_factory=list)
    asked: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    is_away: bool = False
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        heads = request.headers
        if self.is_away:
            assert request.transport is not None
            request.transport.close()
        path, match = request.path, heads.get("If-Match")
        self.asked.append((request.method, path, heads.get("Range"), match))
        if (page := self.pages.get(path)) is None:
            return web.Response(status=404)
        if request.method == "HEAD":
            response = web.StreamResponse(headers=headers_of(page))
            response.content_length = len(page.body)
            await response.prepare(request)
            return response
        if match and match != page.etag:
            return web.Response(status=412)
        asked = heads.get("Range", "bytes=0-").removeprefix("bytes=")
        answer = Answer(request, page, int(asked.partition("-")[0]), self.is_over)
        return await (self.script.pop(0) if self.script else well)(answer)


async def well(answer: Answer) -> web.StreamResponse:
    response = await answer.begin()
    await response.write(answer.rest)
    return response


def cut_after(count: int) -> Serve:
    """Close the connection after so many bytes of the body."""

    async def serve(answer: Answer) -> web.StreamResponse:
        response = await answer.begin()
        await response.write(answer.rest[:count])
        answer.cut()
        return response

    return serve


def status(code: int, text: str = "") -> Serve:
    async def serve(answer: Answer) -> web.StreamResponse:
        return web.Response(status=code, text=text)

    return serve


async def whole_instead_of_a_part(answer: Answer) -> web.StreamResponse:
    """Ignore the header Range, which a server may."""
    answer.offset = 0
    return await well(answer)


async def silence(answer: Answer) -> web.StreamResponse:
    """Send some, and then nothing."""
    response = await answer.begin()
    await response.write(answer.rest[:1000])
    await answer.is_over.wait()
    return response


@asynccontextmanager
async def serving(
    serve: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """Have all requests answered by `serve`; yield the URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def web_server() -> AsyncIterator[WebServer]:
    server = WebServer()
    async with serving(server.serve) as url:
        server.url = url
        try:
            yield server
        finally:
            server.is_over.set()


def lead_s3_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process take the server for S3."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
