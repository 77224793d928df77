"""Builds /resident: the models that take inferences, and what they hold."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from adapter.control.door import ControlState, ModelRecord, Registry
from adapter.core.memory import total
from adapter.runtime import clock

_AT_ONCE = 200  # models: about a millisecond


class Resident:
    """The models that take inferences, by whomever they were loaded."""

    def __init__(self, registry: Registry, state: ControlState) -> None:
        self._registry = registry
        self._state = state

    async def parts(self) -> AsyncIterator[str]:
        """Yield pieces of JSON, the longest idle first; others have their turn between them."""
        rows = []
        now = clock.monotonic()
        for at, record in enumerate(self._registry.records(), 1):
            if self._registry.is_serving(record):  # of two versions, the one that gets calls
                rows.append(self._row(record, now))
            if at % _AT_ONCE == 0:
                await asyncio.sleep(0)
        rows.sort(key=lambda row: (-row["idle_seconds"], row["name"]))
        yield '{"models": ['
        for start in range(0, len(rows), _AT_ONCE):
            lines = [json.dumps(row) for row in rows[start : start + _AT_ONCE]]
            yield ("," if start else "") + "\n" + ",\n".join(lines)
            await asyncio.sleep(0)
        yield "\n]}\n"

    def _row(self, record: ModelRecord, now: float) -> dict[str, Any]:
        return {
            "name": record.asked_for,
            "bytes": total(self._state.held(record)),
            "idle_seconds": 0.0 if record.usage.in_flight else round(now - record.usage.used_at, 3),
            "in_flight": record.usage.in_flight,
        }
