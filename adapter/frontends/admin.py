"""Serves the admin listener: probes with reasons, metrics, internal state.

Liveness does not depend on Triton: restarting the adapter does not repair Triton. It does repair an
adapter that has lost a background task.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from adapter.control.models import ModelControl
from adapter.core.memory import MemoryReading
from adapter.core.registry import ModelRecord
from adapter.frontends.drain import Drain
from adapter.telemetry.metrics import Metrics

_FRESH_SECONDS = 2.0  # the maximum age of memory readings in a scrape
_AT_ONCE = 20  # models: a tenth of a millisecond
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


class Admin:
    """`why_not_live` and the like return a reason, None when there is none. `drain_seconds` limits
    a drain whose request has no timeout.
    """

    def __init__(
        self,
        control: ModelControl,
        metrics: Metrics,
        *,
        why_not_live: Callable[[], str | None],
        why_not_started: Callable[[], str | None],
        why_not_ready: Callable[[], str | None],
        drain: Drain,
        drain_seconds: float,
        about: dict[str, str],
        config: dict[str, Any],
    ) -> None:
        self._control = control
        self._metrics = metrics
        self._why_not_live = why_not_live
        self._why_not_started = why_not_started
        self._why_not_ready = why_not_ready
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._about = about
        self._config = config

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/startup", self._startup)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._scrape)
        app.router.add_post("/drain", self._finish)
        app.router.add_get("/debug/state", self._state)
        app.router.add_get("/debug/config", self._configuration)
        app.router.add_get("/debug/tasks", _tasks)
        return app

    async def _livez(self, _: web.Request) -> web.Response:
        return _probe(self._why_not_live())

    async def _startup(self, _: web.Request) -> web.Response:
        return _probe(self._why_not_started())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _probe(self._why_not_ready())

    async def _finish(self, request: web.Request) -> web.Response:
        """Drain for good: nothing but the end of the process follows."""
        text = request.query.get("timeout", str(self._drain_seconds))
        if _SECONDS.fullmatch(text) is None:
            reason = f"timeout={text[:50]!r}: a number of seconds is accepted"
            return web.json_response({"status": "not drained", "reason": reason}, status=400)
        self._drain.begin()
        left = await self._drain.finished(float(text))
        if left:
            reason = f"{left} in flight after {text} s"
            return web.json_response({"status": "not drained", "reason": reason}, status=503)
        return web.json_response({"status": "drained"})

    async def _scrape(self, _: web.Request) -> web.Response:
        """Reuse a recent sample: reading memory visits all processes, and loads and unloads do so
        each half second.
        """
        samples = self._control.memory.samples
        if not samples or time.monotonic() - samples[-1][0] > _FRESH_SECONDS:
            await self._control.memory.read()
        return web.Response(
            body=generate_latest(self._metrics.registry),
            headers={"Content-Type": CONTENT_TYPE_LATEST},
        )

    async def _state(self, request: web.Request) -> web.StreamResponse:
        """Stream the state, yielding between parts: there may be thousands of models."""
        reading = await self._control.memory.read()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        head = json.dumps(self._about | self._totals(reading))
        await response.write(f'{head[:-1]}, "models": [\n'.encode())
        records = self._control.registry.records()
        for start in range(0, len(records), _AT_ONCE):
            lines = [json.dumps(self._model(each)) for each in records[start : start + _AT_ONCE]]
            comma = ",\n" if start else ""
            await response.write((comma + ",\n".join(lines)).encode())
            await asyncio.sleep(0)
        await response.write(b"\n]}\n")
        return response

    def _totals(self, reading: MemoryReading | None) -> dict[str, Any]:
        return {
            "abandoned_requests": self._control.leases.abandoned,
            "memory": self._memory(reading),
        }

    def _model(self, record: ModelRecord) -> dict[str, Any]:
        memory = self._control.memory
        learned = memory.sizes.learned(record.package_key)
        return {
            "model_id": record.id,
            "triton_name": record.name,
            "url": record.source.url,
            "state": record.state.value,
            "in_flight": record.in_flight,
            "abandoned": record.abandoned,
            "bytes": memory.ledger.of(record.id),
            "is_measured": learned is not None and memory.is_measured(record.id),
        }

    def _memory(self, reading: MemoryReading | None) -> dict[str, Any]:
        used = reading.used if reading else {}
        return {
            "source": reading.source if reading else None,
            "devices": {
                device: {
                    "limit_bytes": figures.limit_bytes,
                    "used_bytes": used.get(device),
                    "free_bytes": figures.free_bytes(used.get(device)),
                    "baseline_bytes": figures.baseline_bytes,
                    "reserved_bytes": figures.reserved_bytes,
                    "held_bytes": figures.held_bytes,
                    "headroom_bytes": figures.headroom_bytes,
                }
                for device, figures in self._control.memory.ledger.snapshot().devices.items()
            },
        }

    async def _configuration(self, _: web.Request) -> web.Response:
        return _shown(self._config)


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
    return web.json_response(value, dumps=lambda value: json.dumps(value, indent=2))


def _probe(reason: str | None) -> web.Response:
    if reason is None:
        return web.json_response({"status": "ok"})
    return web.json_response({"status": "not ready", "reason": reason}, status=503)
