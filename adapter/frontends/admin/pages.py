"""Serves operators: probes, metrics, drain, models, internal state, and the page that shows it.

Liveness does not depend on Triton: restarting the adapter does not repair Triton. It does repair an
adapter that has lost a background task.
"""

import asyncio
import base64
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from aiohttp import ClientConnectionResetError, HttpVersion11, web
from prometheus_client.exposition import gzip_accepted

from adapter.control.door import ControlState, Models
from adapter.core.model import ModelId
from adapter.errors import (
    AdapterError,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    Unauthenticated,
)
from adapter.frontends.access import Access, SitePolicy
from adapter.frontends.admin.actions import MAX_BODY_BYTES, ModelActions
from adapter.frontends.admin.models import Resident
from adapter.frontends.admin.state import DebugState, parse_query
from adapter.frontends.admin.store_models import ModelListing, parse_list_query
from adapter.frontends.drain import Drain
from adapter.frontends.routes import ADMIN_ROUTES, CONTROL, openapi
from adapter.frontends.status import HTTP, challenge, lookup_kind
from adapter.telemetry.metrics import Metrics

_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
BODY_SECONDS = 60.0
_FRESH_SECONDS = 2.0  # the maximum age of memory readings in a scrape
log = logging.getLogger(__name__)
_FILE = Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages(Protocol):
    """Serves some of the pages of a listener."""

    def handlers(self) -> Mapping[str, Handler]:
        """Return what answers each operation of ADMIN_ROUTES that is served here."""


class Probes:
    """Serves /livez, /startup, /readyz and /metrics."""

    def __init__(
        self,
        state: ControlState,
        metrics: Metrics,
        *,
        # each returns a reason, None when there is none
        why_not_live: Callable[[], str | None],
        why_not_started: Callable[[], str | None],
        why_not_ready: Callable[[], str | None],
        notes: Callable[[], Sequence[str]] = list,  # on what is amiss while the adapter is ready
    ) -> None:
        self._state = state
        self._metrics = metrics
        self._why_not_live = why_not_live
        self._why_not_started = why_not_started
        self._why_not_ready = why_not_ready
        self._notes = notes

    def handlers(self) -> Mapping[str, Handler]:
        """Return what answers each operation."""
        return {
            "livez": self._livez,
            "startup": self._startup,
            "readyz": self._readyz,
            "metrics": self._scrape,
        }

    async def _livez(self, _: web.Request) -> web.Response:
        return _probe(self._why_not_live())

    async def _startup(self, _: web.Request) -> web.Response:
        return _probe(self._why_not_started())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _probe(self._why_not_ready(), self._notes())

    async def _scrape(self, request: web.Request) -> web.Response:
        # reading memory visits all processes, and loads and unloads do so each half second
        await self._state.read_memory(max_age_seconds=_FRESH_SECONDS)
        body, content_type = self._metrics.page(request.headers.get("Accept", ""))
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        response = web.Response(body=body, headers=headers)
        if gzip_accepted(request.headers.get("Accept-Encoding", "")):
            response.enable_compression(web.ContentCoding.gzip)  # a thread compresses what is large
        return response


def _probe(reason: str | None, notes: Sequence[str] = ()) -> web.Response:
    if reason is None:
        return answer({"status": "ok"} | ({"notes": [*notes]} if notes else {}))
    return answer({"status": "not ready", "reason": reason}, status=503)


# -- what each listener for operators does ------------------------------------------------------


def application(sites: SitePolicy, *pages: Pages) -> web.Application:
    """Return what serves these pages, and refuses requests of other sites' pages."""

    @web.middleware
    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer the errors of aiohttp's router as JSON."""
        try:
            sites.check(request.headers)
            return await handler(request)
        except Forbidden as error:
            return _error(403, str(error))
        except Unauthenticated as error:
            return _error(401, str(error), **{"WWW-Authenticate": challenge(error)})
        except web.HTTPNotFound:
            return _error(404, f"unknown path {request.raw_path[:200]!r}")
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            text = f"{request.method} is not allowed here; allowed: {allowed}"
            return _error(405, text, Allow=allowed)
        except ClientConnectionResetError:
            # the caller has left amid an answer: nobody reads this one, and aiohttp logs no error
            return _error(499, "the caller has left")

    app = web.Application(
        middlewares=[_answered_bugs, _without_ambiguity, answered],
        client_max_size=MAX_BODY_BYTES,
    )
    app.on_response_prepare.append(_without_server)
    for operation, serve in (item for each in pages for item in each.handlers().items()):
        route = ADMIN_ROUTES[operation]
        add = app.router.add_get if route.method == "GET" else app.router.add_post
        add(route.path, serve, expect_handler=_continue_if_expected)
    return app


async def _continue_if_expected(request: web.Request) -> None:
    """Send `100 Continue` to a caller who waits for it; ignore other expectations.

    aiohttp refuses them, and fails on one that is not UTF-8.
    """
    is_waiting = request.headers.get("Expect", "").lower() == "100-continue"
    if is_waiting and request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # `_answered_bugs` takes what was written for the begin of an answer
        request.writer.output_size = 0


@web.middleware
async def _answered_bugs(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except Exception:
        fields = {"method": request.method, "path": request.raw_path[:500], "status": 500}
        log.exception("request.failed", extra=fields)
        if request.writer.output_size:  # the caller sees that by an answer that breaks off
            raise
        return _error(500, "internal error; see the log")


@web.middleware
async def _without_ambiguity(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what others may see another end of than aiohttp, which takes all behind the head of
    CONNECT for the next request. Refuse compressed bodies too: the page sends none.
    """
    headers = request.headers
    has_body = "Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0"
    if request.method == "CONNECT":
        response = _error(400, "CONNECT is not served: this is not a proxy")
    elif has_body and "Upgrade" in headers:
        response = _error(400, "a request with a body is not upgraded: send it without Upgrade")
    elif has_body and "Content-Encoding" in headers:
        response = _error(400, "Content-Encoding is not accepted here: send the body uncompressed")
    else:
        return await handler(request)
    response.force_close()
    return response


async def _without_server(_: web.Request, response: web.StreamResponse) -> None:
    """Hide the server's software and version from callers."""
    response.headers.popall("Server", None)


def answer(
    value: dict[str, Any],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    indent: int | None = None,
) -> web.Response:
    """Return a response with JSON."""
    text = f"{json.dumps(value, indent=indent)}\n"
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")


def _error(status: int, text: str, **headers: str) -> web.Response:
    return answer({"error": text}, status=status, headers=headers)


class Admin:
    """Serves what operators do and look at, and the page that shows it."""

    def __init__(
        self,
        debug_state: DebugState,
        resident: Resident,
        listing: ModelListing,
        models: Models,
        *,
        actions: ModelActions,
        access: Access,
        model_access: Access,  # for the calls that reach models, which `endpoint_keys` may close
        drain: Drain,
        drain_seconds: float,  # limits a drain whose request has no timeout
        config: dict[str, Any],
    ) -> None:
        self._debug_state = debug_state
        self._resident = resident
        self._listing = listing
        self._known_models = models
        self._actions = actions
        self._access = access
        self._model_access = model_access
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._config = config

    def handlers(self) -> Mapping[str, Handler]:
        """Return what answers each operation."""
        return {
            "page": Page().show,
            "openapi": _openapi,
            "resident": self._models,
            "store_models": self._list_models,
            "state": self._state,
            "config": self._configuration,
            "tasks": _tasks,
            "drain": self._finish,
            "forget": self._forget,
            "load": self._load,
            "unload": self._unload,
            "infer": self._infer,
        }

    async def _finish(self, request: web.Request) -> web.Response:
        """Drain for good: nothing but the end of the process follows."""
        self._access.check(CONTROL, request.headers.getall("Authorization", ()))
        text = request.query.get("timeout", str(self._drain_seconds))
        if _SECONDS.fullmatch(text) is None:
            reason = f"timeout={text[:50]!r}: a number of seconds is accepted"
            return answer({"status": "not drained", "reason": reason}, status=400)
        self._drain.begin()
        in_flight = await self._drain.wait_until_finished(float(text))
        if in_flight:
            reason = f"{in_flight} in flight after {text} s"
            return answer({"status": "not drained", "reason": reason}, status=503)
        return answer({"status": "drained"})

    async def _forget(self, request: web.Request) -> web.Response:
        """Forget what was learned of the package of one model."""
        self._access.check(CONTROL, request.headers.getall("Authorization", ()))
        model_id = request.query.get("model_id", "")
        if not model_id:
            return answer({"error": "model_id: the name of a model is missing"}, status=400)
        try:
            forgotten = self._known_models.forget(ModelId(model_id))
        except ModelNotFound as error:
            return answer({"error": str(error)}, status=404)
        size = forgotten.size
        return answer(
            {
                "status": "forgotten",
                "model_id": model_id,
                "bytes": dict(size.bytes) if size is not None else None,
                "is_measured": size is not None and size.is_measured,
                "needs_more_than_bytes": dict(forgotten.too_little) or None,
                "was_too_large": forgotten.was_too_large,
            }
        )

    async def _load(self, request: web.Request) -> web.Response:
        """Load a model, which then stays."""
        self._check_model_access(request)
        try:
            name = _read_name(request)
            await self._actions.load(name)
        except AdapterError as error:
            return _refuse(error)
        return answer({"status": "loaded", "model_id": name})

    async def _unload(self, request: web.Request) -> web.Response:
        """Unload a model."""
        self._check_model_access(request)
        try:
            name = _read_name(request)
            await self._actions.unload(name)
        except AdapterError as error:
            return _refuse(error)
        return answer({"status": "unloaded", "model_id": name})

    async def _infer(self, request: web.Request) -> web.Response:
        """Answer an inference; that of the package's sample if the request has no body."""
        self._check_model_access(request)
        try:
            name = _read_name(request)
            text = await self._actions.infer(name, await _read_body(request))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        except AdapterError as error:
            return _refuse(error)
        return web.Response(body=text, content_type="application/json")

    def _check_model_access(self, request: web.Request) -> None:
        """Raise as Access does for a request that may not reach models."""
        self._model_access.check(CONTROL, request.headers.getall("Authorization", ()))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await _streamed(request, self._resident.parts())

    async def _list_models(self, request: web.Request) -> web.Response:
        """Answer a page of the models of the stores, or, with a name, all about one model."""
        name = request.query.get("name")
        try:
            query = parse_list_query(request.query)
            if name is not None:
                return answer(await self._listing.show_model(name))
            return answer(await self._listing.list_models(query))
        except AdapterError as error:
            return _refuse(error)

    async def _state(self, request: web.Request) -> web.StreamResponse:
        try:
            query = parse_query(request.query)
        except InvalidRequest as error:
            return answer({"error": str(error)}, status=400)
        return await _streamed(request, self._debug_state.parts(query))

    async def _configuration(self, _: web.Request) -> web.Response:
        return answer(self._config, indent=2)


def _read_name(request: web.Request) -> str:
    """Return the model that an action is for. Raises InvalidRequest."""
    name = request.query.get("model_id", "")
    if not name:
        raise InvalidRequest("model_id: the name of a model is missing")
    return name


async def _read_body(request: web.Request) -> bytes:
    """Return the body. Raises InvalidRequest if it is broken, or does not come in time."""
    try:
        # aiohttp waits for ever, also for the rest of a body whose chunks it could not read
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError as error:
        raise InvalidRequest(f"the body did not come within {BODY_SECONDS} s") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest("the body is broken") from error
    except ConnectionResetError as error:
        raise ClientConnectionResetError("the caller has left amid the body") from error


def _refuse(error: AdapterError) -> web.Response:
    """Return the answer for an error, with the status that the other listeners give it."""
    status_and_code = lookup_kind(HTTP, type(error))
    return _error(500 if status_and_code is None else status_and_code[0], str(error))


async def _streamed(request: web.Request, parts: AsyncIterator[str]) -> web.StreamResponse:
    """Answer pieces of JSON as they are made: there may be thousands of models."""
    first = await anext(parts)  # an error here is still answered with its status
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(first.encode())
    async for part in parts:
        await response.write(part.encode())
    return response


async def _openapi(_: web.Request) -> web.Response:
    return web.Response(body=openapi(), content_type="application/json")


async def _tasks(_: web.Request) -> web.Response:
    """Show where each task is suspended, to debug a process that hangs."""
    return web.Response(text="\n".join(map(_standing, asyncio.all_tasks())))


def _standing(task: asyncio.Task[Any]) -> str:
    """Return the whole chain of awaits; asyncio shows only its first frame."""
    lines = [f"{task.get_name()}:"]
    awaited: Any = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        code = frame.f_code
        lines.append(f"  {code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        awaited = getattr(awaited, "cr_await", None)
    return "\n".join(lines) + "\n"


class Page:
    """Has the page in memory. Nothing runs in it, and nothing styles it, but what the file has:
    its policy names both by their hashes, and lets it ask nobody but this listener.
    """

    def __init__(self) -> None:
        self._text = _FILE.read_text(encoding="utf-8")
        self._headers = {
            "Content-Security-Policy": content_security_policy(self._text),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    async def show(self, _: web.Request) -> web.Response:
        """Answer with the page."""
        return web.Response(text=self._text, content_type="text/html", headers=self._headers)


def content_security_policy(text: str) -> str:
    """Allow the scripts and styles of `text` and no others."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    rules = [
        "default-src 'none'",
        *(f"{kind}-src {' '.join(found)}" for kind, found in hashes.items()),
        "connect-src 'self'",
        "img-src data:",  # the empty icon, so that a browser asks for none
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return "; ".join(rules)
