"""Serves probes with their reasons, and metrics; and what all listeners for operators share.

Liveness does not depend on Triton: restarting the adapter does not repair Triton. It does repair an
adapter that has lost a background task.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import ClientConnectionResetError, web
from prometheus_client.exposition import gzip_accepted

from adapter.control.models import ModelControl
from adapter.errors import Forbidden, Unauthenticated, let_go
from adapter.frontends.sites import SitePolicy
from adapter.frontends.status import challenge
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics

_FRESH_SECONDS = 2.0  # the maximum age of memory readings in a scrape


log = logging.getLogger(__name__)


class Pages(Protocol):
    def add_to(self, router: web.UrlDispatcher) -> None: ...


class Probes:
    """/livez, /startup, /readyz and /metrics. `why_not_live` and the like return a reason, None
    when there is none. `notes`: what is amiss while the adapter is ready all the same.
    """

    def __init__(
        self,
        control: ModelControl,
        metrics: Metrics,
        *,
        why_not_live: Callable[[], str | None],
        why_not_started: Callable[[], str | None],
        why_not_ready: Callable[[], str | None],
        notes: Callable[[], Sequence[str]] = list,
    ) -> None:
        self._control = control
        self._metrics = metrics
        self._why_not_live = why_not_live
        self._why_not_started = why_not_started
        self._why_not_ready = why_not_ready
        self._notes = notes

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/livez", self._livez)
        router.add_get("/startup", self._startup)
        router.add_get("/readyz", self._readyz)
        router.add_get("/metrics", self._scrape)

    async def _livez(self, _: web.Request) -> web.Response:
        return _probe(self._why_not_live())

    async def _startup(self, _: web.Request) -> web.Response:
        return _probe(self._why_not_started())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _probe(self._why_not_ready(), self._notes())

    async def _scrape(self, request: web.Request) -> web.Response:
        """Reuse a recent sample: reading memory visits all processes, and loads and unloads do so
        each half second.
        """
        samples = self._control.memory.samples
        if not samples or clock.monotonic() - samples[-1][0] > _FRESH_SECONDS:
            await self._control.memory.read()
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


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(sites: SitePolicy, *pages: Pages) -> web.Application:
    """Return what serves these pages, and refuses requests of other sites' pages."""

    @web.middleware
    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer the errors of aiohttp's router as JSON."""
        try:
            sites.check(request.method, request.headers)
            return await handler(request)
        except Forbidden as error:
            return _error(403, str(error))
        except Unauthenticated as error:
            return _error(401, str(error), **{"WWW-Authenticate": challenge(error)})
        except web.HTTPNotFound:
            return _error(404, f"there is nothing at {request.raw_path[:200]!r}")
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            text = f"{request.method} is not allowed here; allowed: {allowed}"
            return _error(405, text, Allow=allowed)
        except ClientConnectionResetError:
            # the caller has left amid an answer: nobody reads this one, and aiohttp logs no error
            return _error(499, "the caller has left")

    app = web.Application(middlewares=[_answered_bugs, answered])
    app.on_response_prepare.append(_without_server)
    for each in pages:
        each.add_to(app.router)
    return app


@web.middleware
async def _answered_bugs(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except Exception as error:
        fields = {"method": request.method, "path": request.raw_path[:500], "status": 500}
        log.exception("request.failed", extra=fields)
        let_go(error)
        if request.writer.output_size:  # the caller sees that by an answer that breaks off
            raise
        return _error(500, "internal error; see the log")


async def _without_server(_: web.Request, response: web.StreamResponse) -> None:
    """What the listener is made of, and in which version, is no caller's business."""
    response.headers.popall("Server", None)


def answer(
    value: dict[str, Any],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    indent: int | None = None,
) -> web.Response:
    text = f"{json.dumps(value, indent=indent)}\n"
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")


def _error(status: int, text: str, **headers: str) -> web.Response:
    return answer({"error": text}, status=status, headers=headers)
