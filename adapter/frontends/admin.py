"""Serves what operators ask of one adapter: its end, its models, and its internal state."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from adapter.errors import InvalidRequest
from adapter.frontends.access import Access
from adapter.frontends.debug_state import DebugState, parse_query
from adapter.frontends.drain import Drain
from adapter.frontends.page import Page
from adapter.frontends.probes import answer
from adapter.frontends.resident import Resident

_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


class Admin:
    """/drain, /resident, /debug, and the page that shows the state. `drain_seconds` limits a drain
    whose request has no timeout.
    """

    def __init__(
        self,
        debug_state: DebugState,
        resident: Resident,
        *,
        access: Access,
        drain: Drain,
        drain_seconds: float,
        config: dict[str, Any],
    ) -> None:
        self._debug_state = debug_state
        self._resident = resident
        self._access = access
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._config = config

    def add_to(self, router: web.UrlDispatcher) -> None:
        Page().add_to(router)
        router.add_post("/drain", self._finish)
        router.add_get("/resident", self._models)
        router.add_get("/debug/state", self._state)
        router.add_get("/debug/config", self._configuration)
        router.add_get("/debug/tasks", _tasks)

    async def _finish(self, request: web.Request) -> web.Response:
        """Drain for good: nothing but the end of the process follows."""
        self._access.check("drain", request.headers.getall("Authorization", ()))
        text = request.query.get("timeout", str(self._drain_seconds))
        if _SECONDS.fullmatch(text) is None:
            reason = f"timeout={text[:50]!r}: a number of seconds is accepted"
            return answer({"status": "not drained", "reason": reason}, status=400)
        self._drain.begin()
        left = await self._drain.finished(float(text))
        if left:
            reason = f"{left} in flight after {text} s"
            return answer({"status": "not drained", "reason": reason}, status=503)
        return answer({"status": "drained"})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await _streamed(request, self._resident.parts())

    async def _state(self, request: web.Request) -> web.StreamResponse:
        try:
            query = parse_query(request.query)
        except InvalidRequest as error:
            return answer({"error": str(error)}, status=400)
        return await _streamed(request, self._debug_state.parts(query))

    async def _configuration(self, _: web.Request) -> web.Response:
        return _shown(self._config)


async def _streamed(request: web.Request, parts: AsyncIterator[str]) -> web.StreamResponse:
    """Answer pieces of JSON as they are made: there may be thousands of models."""
    first = await anext(parts)  # what fails here is answered as an error
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(first.encode())
    async for part in parts:
        await response.write(part.encode())
    return response


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


def _shown(value: dict[str, Any]) -> web.Response:
    return answer(value, indent=2)
