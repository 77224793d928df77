"""A bucket of S3 that fails as buckets do, and tells who listens which version it has named.

It holds models: a model is one object (an archive), or the objects below its key (a folder). A put
replaces all of a model's objects at one moment. `mood` says how requests fare:

- WELL: all is answered.
- STORMY: each request may meet a fault of its own: refused with 500 or 503 SlowDown, cut, stalled,
  of a wrong length, garbled.
- REFUSING, FAILING, SLOWED, STALLED: nothing is answered; connections are refused, each answer is a
  500 or a 503 SlowDown, or nobody answers at all.
"""

import asyncio
import hashlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any
from urllib.parse import unquote
from xml.sax.saxutils import escape

from aiohttp import web

from tests.buckets import KEYS

BUCKET = "models"
PREFIX = "production"
_STORM_SHARE = 0.3
_STALL_SECONDS = 20
_TIME = "Wed, 21 Oct 2015 07:28:00 GMT"


class Mood(Enum):
    """Says how a bucket behaves."""

    WELL = "well"
    STORMY = "stormy"
    REFUSING = "refusing connections"
    FAILING = "answering 500"
    SLOWED = "answering 503 SlowDown"
    STALLED = "answering nothing"

    @property
    def is_away(self) -> bool:
        """Return whether nothing at all can be had."""
        return self not in {Mood.WELL, Mood.STORMY}


def etag_of(content: bytes) -> str:
    """Return the ETag that S3 gives to an object."""
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


class BadBucket:
    """Serves S3's HEAD, GET and ListObjectsV2 to anybody, on an event loop of its own."""

    def __init__(self, seed: int) -> None:
        self.mood = Mood.WELL
        self.faults: Counter[str] = Counter()
        self.garbled: Counter[str] = Counter()  # answers with other bytes, by model
        # called in the loop with the key of a model, before the answer that names its version
        self.on_named: Callable[[str], None] = lambda _: None
        self._dice = random.Random(seed)
        self._objects: dict[str, bytes] = {}  # by path below the prefix
        self._models: dict[str, set[str]] = {}  # the paths of each model
        self._etags: dict[str, str] = {}
        self._loop: asyncio.AbstractEventLoop
        self._runner: web.AppRunner
        self._site: web.TCPSite | None = None
        self._port = 0

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables that lead an adapter here."""
        return {**KEYS, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self._port}"}

    @property
    def url(self) -> str:
        """Return the location for `model_store`."""
        return f"s3://{BUCKET}/{PREFIX}"

    # -- called by tests, in any thread -----------------------------------------------------

    def put(self, key: str, objects: Mapping[str, bytes]) -> None:
        """Replace a model; without objects it is deleted."""
        etags = {path: etag_of(content) for path, content in objects.items()}

        async def replace() -> None:
            for path in self._models.pop(key, ()):
                del self._objects[path], self._etags[path]
            self._objects.update(objects)
            self._etags.update(etags)
            self._models[key] = set(objects)
            self.garbled[key] = 0

        self._run(replace())

    def set_mood(self, mood: Mood) -> None:
        """Behave so from now on."""
        self.mood = mood
        self._run(self._refuse() if mood is Mood.REFUSING else self._listen())

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    # -- the server -------------------------------------------------------------------------

    async def open(self) -> None:
        """Listen at a free port, which stays the same."""
        self._loop = asyncio.get_running_loop()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        await self._listen()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop, and close all connections."""
        await self._runner.cleanup()

    async def _listen(self) -> None:
        if self._site is None:
            self._site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
            await self._site.start()

    async def _refuse(self) -> None:
        if self._site is not None:
            await self._site.stop()
            self._site = None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.mood.is_away:
            return await self._answer_away(request)
        path = unquote(request.path).removeprefix(f"/{BUCKET}").strip("/")
        fault = self._draw_fault(request)
        self.faults[fault] += fault != ""
        if fault in {"500", "503"}:
            return _error(int(fault))
        if fault == "reset":
            return _cut(request)
        is_list = "list-type" in request.query
        if fault == "stall" and (is_list or request.method == "HEAD"):
            await asyncio.sleep(_STALL_SECONDS)
            return _cut(request)
        if is_list:
            return self._list(request.query.get("prefix", ""), is_cut=fault == "cut")
        path = path.removeprefix(f"{PREFIX}/")
        content = self._objects.get(path)
        if content is None:
            return _error(404)
        if request.method == "HEAD":
            self.on_named(path)
            return await self._head(request, path, fault)
        return await self._get(request, path, fault)

    async def _answer_away(self, request: web.Request) -> web.StreamResponse:
        if self.mood is Mood.FAILING:
            return _error(500)
        if self.mood is Mood.SLOWED:
            return _error(503)
        if self.mood is Mood.STALLED:
            await asyncio.sleep(_STALL_SECONDS)
        return _cut(request)

    def _draw_fault(self, request: web.Request) -> str:
        if self.mood is Mood.WELL or self._dice.random() > _STORM_SHARE:
            return ""
        kinds = ["500", "503", "reset", "stall", "cut"]
        if request.method == "HEAD":
            kinds = ["500", "503", "reset", "stall", "longer", "huge"]
        elif "list-type" not in request.query:
            kinds += ["longer", "garbled", "whole", "slow"]
        return self._dice.choice(kinds)

    def _list(self, prefix: str, *, is_cut: bool) -> web.Response:
        key = prefix.removeprefix(f"{PREFIX}/").strip("/")
        below = sorted(path for path in self._objects if path.startswith(f"{key}/"))
        if not is_cut and key not in self._objects:
            self.on_named(key)
        rows = "".join(
            f"<Contents><Key>{escape(f'{PREFIX}/{path}')}</Key>"
            "<LastModified>2015-10-21T07:28:00.000Z</LastModified>"
            f"<ETag>{escape(self._etags[path])}</ETag><Size>{len(self._objects[path])}</Size>"
            "</Contents>"
            for path in below
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        return web.Response(text=text[: len(text) // 2] if is_cut else text)

    async def _head(self, request: web.Request, path: str, fault: str) -> web.StreamResponse:
        response = web.StreamResponse(headers=self._headers(path))
        excess_bytes = {"longer": 10, "huge": 10**12}.get(fault, 0)
        response.content_length = len(self._objects[path]) + excess_bytes
        await response.prepare(request)
        return response

    def _headers(self, path: str) -> dict[str, str]:
        return {"Last-Modified": _TIME, "ETag": self._etags[path]}

    async def _get(self, request: web.Request, path: str, fault: str) -> web.StreamResponse:
        """Answer with the object of this moment, though another one may be put before the end."""
        content = self._objects[path]
        headers = self._headers(path)
        match = request.headers.get("If-Match")
        if match and match != headers["ETag"]:
            return _error(412)
        first, _, last = request.headers.get("Range", "").removeprefix("bytes=").partition("-")
        start = int(first or 0)
        end = int(last) + 1 if last else len(content)
        is_part = "Range" in request.headers and fault != "whole"
        body = content[start:end] if is_part else content
        if is_part:
            headers["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{len(content)}"
        if fault == "garbled":
            body = self._garble(path, body)
        response = web.StreamResponse(status=206 if is_part else 200, headers=headers)
        response.content_length = len(body) + (10 if fault == "longer" else 0)
        await response.prepare(request)
        with suppress(ConnectionError):  # the adapter has enough, or was killed
            await self._send(request, response, body, fault)
        return response

    def _garble(self, path: str, body: bytes) -> bytes:
        """Return as many bytes, some of them others."""
        self.garbled[next(key for key, paths in self._models.items() if path in paths)] += 1
        changed = bytearray(body)
        for _ in range(20):
            changed[self._dice.randrange(len(changed))] ^= self._dice.randrange(1, 256)
        return bytes(changed)

    async def _send(
        self, request: web.Request, response: web.StreamResponse, body: bytes, fault: str
    ) -> None:
        if fault in {"cut", "stall"}:
            await response.write(body[: self._dice.randrange(len(body) + 1)])
            await asyncio.sleep(_STALL_SECONDS if fault == "stall" else 0)
        elif fault == "slow":
            step = len(body) // 10 + 1
            for start in range(0, len(body), step):
                await response.write(body[start : start + step])
                await asyncio.sleep(0.2)
        else:
            await response.write(body)
        if fault in {"cut", "stall", "longer"}:
            _cut(request)


def _error(status: int) -> web.Response:
    code = {404: "NoSuchKey", 412: "PreconditionFailed", 503: "SlowDown"}.get(status, "Internal")
    return web.Response(status=status, text=f"<Error><Code>{code}</Code></Error>")


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


@contextmanager
def bad_bucket(seed: int) -> Iterator[BadBucket]:
    """Run a bucket in a thread; it is in good mood."""
    bucket = BadBucket(seed)
    is_open = threading.Event()
    is_over = asyncio.Event()

    async def run() -> None:
        await bucket.open()
        is_open.set()
        await is_over.wait()
        await bucket.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert is_open.wait(30)
    try:
        yield bucket
    finally:
        bucket._loop.call_soon_threadsafe(is_over.set)
        thread.join(60)
