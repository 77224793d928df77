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
_RANKED_AT_ONCE = 500  # models of which only the order is found
_MAX_MODELS = 100_000
_DIGITS = re.compile(r"[0-9]{1,6}")  # Python reads no number of more than 4,300 digits
_HOLDERS = 12  # of a device: those that a bar can show
_FAILURES = 20
_MOVING = BEING_LOADED | {ModelState.UNLOADING}
_GONE = "GONE"  # of a record whose model went while the state was written


@dataclass(frozen=True, slots=True)
class Query:
    """Says which models are shown, and which come first."""

    model_id: str | None = None
    limit: int | None = None  # None for all
    order: str | None = None
    is_reversed: bool = False  # the last of `order` comes first
    text: str = ""  # in the names of the models


def parse_query(query: Mapping[str, str]) -> Query:
    """Return which models the query of a request asks for. Raises InvalidRequest."""
    limit_text = query.get("models")
    order = query.get("sort")
    if limit_text is not None and not _is_number(limit_text):
        raise InvalidRequest(
            f"models={limit_text[:50]!r}: a number up to {_MAX_MODELS} is accepted"
        )
    name = order and order.removeprefix("-")
    if name is not None and name not in _ORDERS:
        accepted = ", ".join(_ORDERS)
        raise InvalidRequest(
            f"sort={name[:50]!r}: one of {accepted} is accepted, with a '-' for the reverse"
        )
    return Query(
        query.get("model_id"),
        None if limit_text is None else int(limit_text),
        name,
        name != order,
        query.get("filter", "").casefold(),
    )


def _is_number(text: str) -> bool:
    """Return whether a text is a number of models that may be asked for."""
    return _DIGITS.fullmatch(text) is not None and int(text) <= _MAX_MODELS


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
        self._started_at = clock.monotonic()

    async def parts(self, query: Query) -> AsyncIterator[str]:
        """Yield the state as pieces of JSON; others have their turn between them."""
        reading = await self._state.read_memory()
        survey = await self._collect(query)
        shown = survey.list_first(query.limit, is_reversed=query.is_reversed)
        head = json.dumps(self._describe_all(query, survey, shown, reading))
        yield f'{head[:-1]}, "models": [\n'
        for start in range(0, len(shown), _AT_ONCE):
            records = shown[start : start + _AT_ONCE]
            lines = [json.dumps(self._describe_model(record)) for record in records]
            yield (",\n" if start else "") + ",\n".join(lines)
            await asyncio.sleep(0)
        yield "\n]}\n"

    async def _collect(self, query: Query) -> "_Survey":
        """Return what all models hold, and which of them the query asks for. Others have their turn
        after some hundred models.
        """
        survey = _Survey()
        now = clock.monotonic()
        order = _ORDERS[query.order] if query.order else _keep_order
        for at, record in enumerate(self._registry.records(), 1):
            held = self._state.held(record)
            for device, count in held.items():
                holder = (count, record.id, _state_value(record))
                survey.held.setdefault(device, []).append(holder)
            if record.state is ModelState.STUCK:
                continue  # another load may have its id: the model would be counted twice
            survey.models += 1
            is_meant = query.model_id in {None, record.id}
            if is_meant and query.text in record.id.casefold():
                survey.matches.append((order(record, total(held), now), at, record))
            if at % _RANKED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return survey

    def _describe_all(
        self,
        query: Query,
        survey: "_Survey",
        shown: Sequence[ModelRecord],
        reading: MemoryReading | None,
    ) -> dict[str, Any]:
        """Return everything of the state but the descriptions of single models."""
        history = self._history
        requests = self._state.requests
        counts = {state.value: n for state, n in self._registry.counts().items() if n}
        totals = {
            "models": survey.models,
            "states": counts,
            "matching": len(survey.matches),
            "shown": len(shown),
            "in_flight": requests.in_flight,
            "served": requests.begun,
        }
        failures = history.failures({"load", "unload", "fetch"})[:_FAILURES]
        return {
            **self._about,
            "uptime_seconds": round(clock.monotonic() - self._started_at, 3),
            "health": self._health(),
            "totals": totals,
            "abandoned_requests": requests.abandoned,
            "on_triton_restart": " as ".join(self._state.triton.on_restart),
            "forgotten": _describe_forgotten(self._state.forgotten(), query.limit),
            "wanted": _describe_wanted(self._state.wanted(), query.limit),
            "memory": self._describe_devices(reading, survey),
            "on_demand": _describe_on_demand(
                self._state.stores, query.text, query.limit, {each.id for each in shown}
            ),
            "worst": self._describe_worst(),
            "failures": [*map(_describe_occurrence, failures)],
            "events": [*map(_describe_occurrence, history.latest())],
        }

    def _describe_worst(self) -> dict[str, Any] | None:
        """Return the worst of what happened lately, as the history judges; None if all is well."""
        registry = self._registry
        monotonic_start = clock.wall() - clock.monotonic()  # in seconds since 1970

        def answered_at(model_id: ModelId) -> float:
            record = registry.get(model_id)
            return monotonic_start + record.usage.answered_at if record else 0.0

        are_lost = bool(self._state.forgotten() or registry.counts()[ModelState.LOST])
        worst = self._history.worst(are_lost=are_lost, answered_at=answered_at)
        return None if worst is None else _describe_occurrence(worst)

    def _describe_model(self, record: ModelRecord) -> dict[str, Any]:
        """Return all that is shown of one model."""
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
            "hanging_seconds": self._count_hanging_seconds(record, now),
            "in_flight": record.usage.in_flight,
            "abandoned": record.usage.abandoned,
            "served": record.usage.served,
            "latency_seconds": _describe_latencies(record),
            "idle_seconds": round(now - record.usage.used_at, 3) if is_idle else None,
            "bytes": size.held,
            "gpu": record.gpu,
            "basis": size.basis_of_held,
            "is_measured": size.is_learned and size.is_measured,
            "size_from": size_from if size.is_learned else None,
            "is_pinned": self._is_pinned(record),
            "warnings": [*record.warnings],
        }

    def _count_hanging_seconds(self, record: ModelRecord, now: float) -> float | None:
        since = self._state.hangs_since(record)
        return None if since is None else round(now - since, 3)

    def _is_pinned(self, record: ModelRecord) -> bool:
        stores = self._state.stores
        return stores is not None and stores.is_pinned(record.id)

    def _describe_devices(self, reading: MemoryReading | None, survey: "_Survey") -> dict[str, Any]:
        """Return the memory of each device, and which models hold most of it."""
        return {
            "source": reading.source if reading else None,
            "devices": {
                device: {
                    **asdict(figures),
                    "holders": [
                        {"model_id": model_id, "bytes": count, "state": state}
                        for count, model_id, state in nlargest(
                            _HOLDERS, survey.held.get(device, ())
                        )
                        if count
                    ],
                }
                for device, figures in self._state.devices(reading).items()
            },
        }


@dataclass(slots=True)
class _Survey:
    """Holds what all models hold of each device, and the models that a query asks for."""

    models: int = 0  # in all
    # models that the query asks for, each behind its sort key and its place among all
    matches: list[tuple[float | str, int, ModelRecord]] = field(default_factory=list)
    # bytes, model and state of those that hold memory of a device
    held: dict[Device, list[tuple[int, ModelId, str]]] = field(default_factory=dict)

    def list_first(self, limit: int | None, *, is_reversed: bool) -> list[ModelRecord]:
        """Return the models in the order of the query, at most `limit`."""
        count = len(self.matches) if limit is None else limit
        choose = nlargest if is_reversed else nsmallest
        return [record for _, _, record in choose(count, self.matches)]


_Order = Callable[[ModelRecord, int, float], float | str]


def _keep_order(_record: ModelRecord, _size: int, _now: float) -> float:
    """Return the same for all models, which then stay in the order of the registry."""
    return 0.0


# By `sort`: what is sorted by, of a model, its bytes and the time; largest and latest come first.
_ORDERS: dict[str, _Order] = {
    "bytes": lambda _record, size, _now: -size,
    "name": lambda record, _size, _now: record.id,
    "state": lambda record, _size, _now: _state_value(record),
    "p50": lambda record, _size, _now: -_find_percentile(record, 50),
    "p99": lambda record, _size, _now: -_find_percentile(record, 99),
    "in_flight": lambda record, _size, _now: -record.usage.in_flight,
    "served": lambda record, _size, _now: -record.usage.served,
    "idle": lambda record, _size, now: 0 if record.usage.in_flight else record.usage.used_at - now,
    "loaded": lambda record, _size, _now: -record.state_since,
}


def _state_value(record: ModelRecord) -> str:
    return record.state.value if record.state else _GONE


def _find_percentile(record: ModelRecord, share: int) -> float:
    """Return a percentile of the latencies of the latest inferences, by the nearest rank; 0 without
    any.
    """
    ordered = sorted(record.usage.latencies)
    return ordered[math.ceil(len(ordered) * share / 100) - 1] if ordered else 0.0


def _describe_latencies(record: ModelRecord) -> dict[str, float] | None:
    """Return percentiles of the latest latencies, and how many these are; None before the first
    inference.
    """
    count = len(record.usage.latencies)
    if count == 0:
        return None
    return {
        "p50": round(_find_percentile(record, 50), 6),
        "p99": round(_find_percentile(record, 99), 6),
        "of": count,
    }


def _describe_wanted(models: Sequence[WantedModel], limit: int | None) -> list[dict[str, Any]]:
    """Return the models that should be loaded. With a limit, those not loaded come first."""
    if limit is not None:
        models = sorted(models, key=lambda model: model.is_loaded)[:limit]
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
    models: Mapping[ModelId, ForgottenModel], limit: int | None
) -> list[dict[str, Any]]:
    """Return the forgotten models, the latest last; with a limit only the latest."""
    listed = [*models.items()]
    first = 0 if limit is None else max(0, len(listed) - limit)
    return [
        {
            "model_id": model_id,
            "time": _format_time(one.at),
            "reason": one.reason,
            "is_given_up": one.is_given_up,
        }
        for model_id, one in listed[first:]
    ]


def _format_time(at: float) -> str:
    """Return a time of day in ISO 8601, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _describe_occurrence(one: Occurrence) -> dict[str, Any]:
    """Return something that happened, with the status that callers get for its error."""
    status_and_code = lookup_kind(HTTP, one.kind) if one.kind else None
    return {
        "time": _format_time(one.at),
        "operation": one.operation,
        "outcome": one.outcome.value,
        "model_id": one.model_id,
        "seconds": round(one.seconds, 3),
        "bytes": one.size_bytes,
        "evicted": one.evicted,
        "status": status_and_code and status_and_code[0],
        "code": status_and_code and status_and_code[1],
        "reason": one.reason or None,
        "figures": None if one.figures is None else asdict(one.figures),
        "count": one.count,
        "is_mended": one.is_mended,
    }


def _describe_on_demand(
    stores: StoreState | None,
    text: str,  # must be in a model's name
    limit: int | None,  # limits the models that are coming or going; None for all of all models
    listed: Collection[ModelId],  # with a limit, only these of the other models are described
) -> dict[str, Any] | None:
    """Return what is known of the stores and their models; None without a store."""
    if stores is None:
        return None
    count, size_bytes = stores.unused()
    disk = stores.disk()
    models = [record for record in stores.models() if text in record.id.casefold()]
    if limit is not None:
        moving = [record for record in models if record.state in _MOVING]
        at_rest = [record for record in models if record.state not in _MOVING]
        models = moving[:limit] + [record for record in at_rest if record.id in listed]
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
            _describe_files(stores, record, files)
            for record in models
            if (files := stores.files_of(record)) is not None
        ],
    }


def _describe_files(stores: StoreState, record: ModelRecord, files: StoreModel) -> dict[str, Any]:
    """Return what is known of the files of a model of a store, and how many callers wait for it."""
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
