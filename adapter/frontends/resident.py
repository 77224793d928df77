"""What /resident says: which models are in memory, for whoever spreads calls over machines."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from adapter.control.models import ModelControl
from adapter.core.memory import total
from adapter.core.registry import ModelRecord
from adapter.core.state import ModelState
from adapter.runtime import clock

_AT_ONCE = 200  # models: about a millisecond


class Resident:
    """The models that take inferences, by whomever they were loaded."""

    def __init__(self, control: ModelControl) -> None:
        self._control = control

    async def parts(self) -> AsyncIterator[str]:
        """Yield pieces of JSON, the longest idle first; others have their turn between them."""
        rows, now = [], clock.monotonic()
        for at, record in enumerate(self._control.registry.records(), 1):
            if self._is_served(record):
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

    def _is_served(self, record: ModelRecord) -> bool:
        """Of two versions of a model only the one that gets its calls is."""
        is_current = self._control.registry.get(record.asked_for) is record
        return is_current and record.state is ModelState.READY

    def _row(self, record: ModelRecord, now: float) -> dict[str, Any]:
        return {
            "name": record.asked_for,
            "bytes": total(self._control.memory.ledger.of(record.id)),
            "idle_seconds": 0.0 if record.in_flight else round(now - record.used_at, 3),
            "in_flight": record.in_flight,
        }
