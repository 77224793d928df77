"""Builds /debug/state: memory, models, what happened lately, and whether all is well.

`?models=N` has N models at most, `?sort=` says which come first (with a `-` before it, which come
last otherwise), `?filter=` keeps those whose name
has that text in it, and `?model_id=` one alone. Totals are of all models whatever is asked for.
"""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from heapq import nlargest, nsmallest
from typing import Any

from adapter.control.door import (
    BEING_LOADED,
    ControlState,
    ForgottenModel,
    ModelRecord,
    Models,
    ModelState,
    StoreModel,
    StoreState,
    WantedModel,
)
from adapter.core.memory import Device, MemoryReading, total
from adapter.core.model import ModelId
from adapter.errors import InvalidRequest
from adapter.frontends.status import HTTP, lookup_kind
from adapter.runtime import clock
from adapter.telemetry.history import History, Occurrence

_AT_ONCE = 20  # models: a third of a millisecond
_LOOKED_AT_ONCE = 500  # models of which only the order is found
_MOST = 100_000
_DIGITS = re.compile(r"[0-9]{1,6}")  # Python reads no number of more than 4,300 digits
_HOLDERS = 12  # of a device: those that a bar can show
_FAILURES = 20
_MOVING = BEING_LOADED | {ModelState.UNLOADING}
_GONE = "GONE"  # of a record whose model went while the state was written


@dataclass(frozen=True, slots=True)
class Query:
    """Says which models are shown, and which come first."""

    model_id: str | None = None
    most: int | None = None  # None for all
    order: str | None = None
    is_reversed: bool = False  # the last of `order` comes first
    text: str = ""  # in the names of the models


def parse_query(query: Mapping[str, str]) -> Query:
    """Raise InvalidRequest."""
    most = query.get("models")
    order = query.get("sort")
    if most is not None and (_DIGITS.fullmatch(most) is None or int(most) > _MOST):
        raise InvalidRequest(f"models={most[:50]!r}: a number up to {_MOST} is accepted")
    name = order and order.removeprefix("-")
    if name is not None and name not in _ORDERS:
        accepted = ", ".join(_ORDERS)
        raise InvalidRequest(
            f"sort={name[:50]!r}: one of {accepted} is accepted, with a '-' for the reverse"
        )
    return Query(
        query.get("model_id"),
        None if most is None else int(most),
        name,
        name != order,
        query.get("filter", "").casefold(),
    )


class DebugState:
    """Shows what control knows, as JSON."""

    def __init__(
        self,
        models: Models,
        state: ControlState,
        history: History,
        *,
        about: Mapping[str, str],
        health: Callable[[], dict[str, Any]],  # whether all is well, and what is not
    ) -> None:
        self._registry = models.registry
        self._state = state
        self._history = history
        self._about = about
        self._health = health
        self._begun = clock.monotonic()

    async def parts(self, query: Query) -> AsyncIterator[str]:
        """Yield the state as pieces of JSON; others have their turn between them."""
        reading = await self._state.read_memory()
        look = await self._collect(query)
        shown = look.first(query.most, is_reversed=query.is_reversed)
        head = json.dumps(self._head(query, look, shown, reading))
        yield f'{head[:-1]}, "models": [\n'
        for start in range(0, len(shown), _AT_ONCE):
            lines = [json.dumps(self._model(each)) for each in shown[start : start + _AT_ONCE]]
            yield (",\n" if start else "") + ",\n".join(lines)
            await asyncio.sleep(0)
        yield "\n]}\n"

    async def _collect(self, query: Query) -> "_Look":
        """Look at all models, but at few at a time."""
        look = _Look()
        now = clock.monotonic()
        order = _ORDERS[query.order] if query.order else _as_it_comes
        for at, record in enumerate(self._registry.records(), 1):
            held = self._state.held(record)
            for device, count in held.items():
                holder = (count, record.id, _state_value(record))
                look.held.setdefault(device, []).append(holder)
            if record.state is ModelState.STUCK:
                continue  # its id may be another model's by now
            look.models += 1
            is_meant = query.model_id in {None, record.id}
            if is_meant and query.text in record.id.casefold():
                look.found.append((order(record, total(held), now), at, record))
            if at % _LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return look

    def _head(
        self,
        query: Query,
        look: "_Look",
        shown: Sequence[ModelRecord],
        reading: MemoryReading | None,
    ) -> dict[str, Any]:
        history = self._history
        requests = self._state.requests
        counts = {state.value: n for state, n in self._registry.counts().items() if n}
        totals = {
            "models": look.models,
            "states": counts,
            "matching": len(look.found),
            "shown": len(shown),
            "in_flight": requests.in_flight,
            "served": requests.begun,
        }
        failures = history.failures({"load", "unload", "fetch"})[:_FAILURES]
        return {
            **self._about,
            "uptime_seconds": round(clock.monotonic() - self._begun, 3),
            "health": self._health(),
            "totals": totals,
            "abandoned_requests": requests.abandoned,
            "on_triton_restart": " as ".join(self._state.triton.on_restart),
            "forgotten": _describe_forgotten(self._state.forgotten(), query.most),
            "wanted": _wanted(self._state.wanted(), query.most),
            "memory": self._devices(reading, look),
            "on_demand": _describe_on_demand(
                self._state.stores, query.text, query.most, {each.id for each in shown}
            ),
            "worst": self._worst(),
            "failures": [*map(_occurrence, failures)],
            "events": [*map(_occurrence, history.latest())],
        }

    def _worst(self) -> dict[str, Any] | None:
        registry = self._registry
        past = clock.wall() - clock.monotonic()

        def answered_at(model_id: ModelId) -> float:
            record = registry.get(model_id)
            return past + record.usage.answered_at if record else 0.0

        are_lost = bool(self._state.forgotten() or registry.counts()[ModelState.LOST])
        worst = self._history.worst(are_lost=are_lost, answered_at=answered_at)
        return None if worst is None else _occurrence(worst)

    def _model(self, record: ModelRecord) -> dict[str, Any]:
        now = clock.monotonic()
        size = self._state.size_of(record)
        size_from = "triton" if size.is_reported else "reading"
        is_idle = record.state is ModelState.READY and record.usage.in_flight == 0
        return {
            "model_id": record.id,
            "triton_name": record.name,
            "triton_names": [*record.placement.names, *record.placement.beside],
            "url": record.source.url,
            "state": _state_value(record),
            "state_seconds": round(now - record.state_since, 3),
            "waits_for": record.step and record.step.value,
            "awaits": [*record.blockers],
            "hanging_seconds": self._hanging_seconds(record, now),
            "in_flight": record.usage.in_flight,
            "abandoned": record.usage.abandoned,
            "served": record.usage.served,
            "latency_seconds": _latencies(record),
            "idle_seconds": round(now - record.usage.used_at, 3) if is_idle else None,
            "bytes": size.held,
            "gpu": record.gpu,
            "basis": size.basis_of_held,
            "is_measured": size.is_learned and size.is_measured,
            "size_from": size_from if size.is_learned else None,
            "is_pinned": self._is_pinned(record),
            "warnings": [*record.warnings],
        }

    def _hanging_seconds(self, record: ModelRecord, now: float) -> float | None:
        since = self._state.hangs_since(record)
        return None if since is None else round(now - since, 3)

    def _is_pinned(self, record: ModelRecord) -> bool:
        stores = self._state.stores
        return stores is not None and stores.is_pinned(record.id)

    def _devices(self, reading: MemoryReading | None, look: "_Look") -> dict[str, Any]:
        return {
            "source": reading.source if reading else None,
            "devices": {
                device: {
                    **asdict(figures),
                    "holders": [
                        {"model_id": model_id, "bytes": count, "state": state}
                        for count, model_id, state in nlargest(_HOLDERS, look.held.get(device, ()))
                        if count
                    ],
                }
                for device, figures in self._state.devices(reading).items()
            },
        }


@dataclass(slots=True)
class _Look:
    """Collects what one walk over all models sees."""

    models: int = 0  # in all
    # models that the query asks for, each behind what it is sorted by
    found: list[tuple[float | str, int, ModelRecord]] = field(default_factory=list)
    # bytes, model and state of those that hold memory of a device
    held: dict[Device, list[tuple[int, ModelId, str]]] = field(default_factory=dict)

    def first(self, most: int | None, *, is_reversed: bool) -> list[ModelRecord]:
        """Return the models in the order of the query."""
        count = len(self.found) if most is None else most
        choose = nlargest if is_reversed else nsmallest
        return [record for _, _, record in choose(count, self.found)]


_Order = Callable[[ModelRecord, int, float], float | str]


def _as_it_comes(_record: ModelRecord, _size: int, _now: float) -> float:
    return 0.0


# By `sort`: what is sorted by, of a model, its bytes and the time; largest and latest come first.
_ORDERS: dict[str, _Order] = {
    "bytes": lambda _record, size, _now: -size,
    "name": lambda record, _size, _now: record.id,
    "state": lambda record, _size, _now: _state_value(record),
    "p50": lambda record, _size, _now: -_rank(record, 50),
    "p99": lambda record, _size, _now: -_rank(record, 99),
    "in_flight": lambda record, _size, _now: -record.usage.in_flight,
    "served": lambda record, _size, _now: -record.usage.served,
    "idle": lambda record, _size, now: 0 if record.usage.in_flight else record.usage.used_at - now,
    "loaded": lambda record, _size, _now: -record.state_since,
}


def _state_value(record: ModelRecord) -> str:
    return record.state.value if record.state else _GONE


def _rank(record: ModelRecord, share: int) -> float:
    """The nearest rank of the latest inferences; 0 without any."""
    ordered = sorted(record.usage.latencies)
    return ordered[math.ceil(len(ordered) * share / 100) - 1] if ordered else 0.0


def _latencies(record: ModelRecord) -> dict[str, float] | None:
    """Return None before the first inference."""
    if not (count := len(record.usage.latencies)):
        return None
    return {"p50": round(_rank(record, 50), 6), "p99": round(_rank(record, 99), 6), "of": count}


def _wanted(models: Sequence[WantedModel], most: int | None) -> list[dict[str, Any]]:
    """Show models that should be loaded; with a limit those that are not loaded come first."""
    if most is not None:
        models = sorted(models, key=lambda model: model.is_loaded)[:most]
    return [
        {
            "model_id": model.model_id,
            "url": model.url,
            "state": model.state,
            "reason": model.reason or None,
        }
        for model in models
    ]


def _describe_forgotten(
    models: Mapping[ModelId, ForgottenModel], most: int | None
) -> list[dict[str, Any]]:
    """Show forgotten models, the latest last."""
    found = [*models.items()]
    return [
        {
            "model_id": model_id,
            "time": _time(one.at),
            "reason": one.reason,
            "is_given_up": one.is_given_up,
        }
        for model_id, one in (
            found if most is None else found[len(found) - min(most, len(found)) :]
        )
    ]


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _occurrence(one: Occurrence) -> dict[str, Any]:
    found = lookup_kind(HTTP, one.kind) if one.kind else None
    return {
        "time": _time(one.at),
        "operation": one.operation,
        "outcome": one.outcome.value,
        "model_id": one.model_id,
        "seconds": round(one.seconds, 3),
        "bytes": one.size_bytes,
        "evicted": one.evicted,
        "status": found and found[0],
        "code": found and found[1],
        "reason": one.reason or None,
        "figures": None if one.figures is None else asdict(one.figures),
        "count": one.count,
        "is_mended": one.is_mended,
    }


def _describe_on_demand(
    stores: StoreState | None,
    text: str,  # must be in a model's name
    most: int | None,  # limits the models that are coming or going; None for all of all models
    listed: Collection[ModelId],  # with a limit, only these of the other models are described
) -> dict[str, Any] | None:
    """Return what is known of the stores and their models; None without a store."""
    if stores is None:
        return None
    count, size_bytes = stores.unused()
    disk = stores.disk()
    models = [record for record in stores.models() if text in record.id.casefold()]
    if most is not None:
        coming = [each for each in models if each.state in _MOVING][:most]
        models = coming + [
            each for each in models if each.state not in _MOVING and each.id in listed
        ]
    return {
        "on_disk": {"models": count, "bytes": size_bytes},
        "disk": {
            "models": disk.artifacts,
            "bytes": disk.size_bytes,
            "fetching_bytes": disk.fetching_bytes,
            "undeleted_bytes": disk.undeleted_bytes,
            "free_bytes": disk.free_bytes,
            "limit_bytes": disk.limit_bytes,
        },
        "waiting": stores.waiting,
        "evictions": dict(stores.evictions),
        "models": [
            _shown(stores, record, files)
            for record in models
            if (files := stores.files_of(record)) is not None
        ],
    }


def _shown(stores: StoreState, record: ModelRecord, files: StoreModel) -> dict[str, Any]:
    return {
        "model_id": record.id,
        "key": str(files.key),
        "state": _state_value(record),
        "percent": files.progress.percent,
        "done_bytes": files.progress.done_bytes,
        "total_bytes": files.progress.total_bytes,
        "waiting": stores.count_waiting(record.id),
        "is_pinned": stores.is_pinned(record.id),
        "is_outdated": files.is_outdated,
    }
