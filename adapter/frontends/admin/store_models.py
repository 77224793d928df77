"""Builds /store/models: the models of the stores, and where each of them is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from adapter.control.door import ControlState, ModelRecord, Registry
from adapter.core.artifacts import ArtifactKey, StorePackage, parse_artifact_path
from adapter.core.model import ModelId
from adapter.core.record import LoadedFor
from adapter.errors import InvalidRequest, ModelNotFound
from adapter.frontends.catalogue import Catalogue, list_all
from adapter.runtime import clock
from adapter.telemetry.history import History

_LIMIT = 100
_MAX_LIMIT = 1000
_LIMIT_DIGITS = re.compile(r"[0-9]{1,4}")  # Python reads no number of more than 4,300 digits
_SEPARATOR = ":"  # between store and key in `after`; no name of an endpoint has one
_NO_STORE = (
    "this adapter has no store: set model_store or endpoints; /debug/state has the loaded models"
)


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Says which models of the stores are listed."""

    store: str | None = None  # None for all stores
    pattern: str = ""
    after: str = ""  # of the page before
    limit: int = _LIMIT


def parse_list_query(query: Mapping[str, str]) -> ListQuery:
    """Parse the query of /store/models. Raises InvalidRequest."""
    limit = query.get("limit", str(_LIMIT))
    if _LIMIT_DIGITS.fullmatch(limit) is None or not 0 < int(limit) <= _MAX_LIMIT:
        raise InvalidRequest(f"limit={limit[:50]!r}: a number from 1 to {_MAX_LIMIT} is accepted")
    after = query.get("after")
    if after is not None and _SEPARATOR not in after:
        raise InvalidRequest(
            f"after={after[:50]!r}: only what an answer has as `after` is accepted"
        )
    return ListQuery(query.get("store"), query.get("filter", ""), after or "", int(limit))


class ModelListing:
    """Joins what the stores have with what control knows of it."""

    def __init__(
        self,
        registry: Registry,
        state: ControlState,
        history: History,
        catalogue: Catalogue | None,  # None without a store
        *,
        is_by_name: bool,  # calls of V2 load models of the stores
    ) -> None:
        self._registry = registry
        self._state = state
        self._history = history
        self._catalogue = catalogue
        self._is_by_name = is_by_name

    async def list_models(self, query: ListQuery) -> dict[str, Any]:
        """Return one page. Raises ModelNotFound and ArtifactNotFound without the store."""
        if self._catalogue is None:
            raise ModelNotFound(_NO_STORE)
        stores = sorted(self._catalogue.stores)
        selected = stores if query.store is None else [query.store]
        first, _, after = query.after.partition(_SEPARATOR)
        selected = [store for store in selected if not query.after or store >= first]
        packages: list[StorePackage] = []
        notes: list[str] = []
        next_after: str | None = None
        for store in selected:
            limit = query.limit - len(packages)
            start = after if store == first else ""
            if limit <= 0:
                next_after = f"{store}{_SEPARATOR}"
                break
            page = await self._catalogue.list_page(store, query.pattern, start, limit)
            packages += page.packages
            notes += [page.note] if page.note is not None else []
            if page.after is not None:
                next_after = f"{store}{_SEPARATOR}{page.after}"
                break
        records = self._list_records_by_key()
        reasons = self._list_failures()
        rows = [
            self._describe_package(package, records.get(package.key, []), reasons)
            for package in packages
        ]
        return {"stores": stores, "models": rows, "after": next_after, "notes": notes}

    async def list_callable(self) -> list[dict[str, Any]]:
        """Return a row for each model that a call by name finds: those of the stores, and those
        that were loaded from elsewhere. Raises InvalidRequest for more than an index may have.
        """
        packages = []
        if self._catalogue is not None and self._is_by_name:
            packages = await list_all(self._catalogue)
        records = self._list_records_by_key()
        reasons = self._list_failures()
        rows = [
            self._describe_package(package, records.get(package.key, []), reasons)
            for package in packages
        ]
        listed = {package.key for package in packages}
        return rows + [
            self._describe_record(record, reasons)
            for record in self._registry.records()
            if record.key not in listed and self._registry.get(record.id) is record
        ]

    async def show_callable(self, name: str) -> dict[str, Any]:
        """Return the row of one model that a call by name finds. Raises ModelNotFound."""
        row = await self.show_model(name)
        if row["where"] != "memory" and not self._is_by_name:
            raise ModelNotFound(f"model {name!r} is not loaded", model_id=ModelId(name))
        return row

    async def show_model(self, name: str) -> dict[str, Any]:
        """Return all that is known of one model.

        Raises ModelNotFound, and as the store does where the model is not on disk.
        """
        record = self._registry.get(ModelId(name))
        package = await self._find_package(name, record)
        if package is None and record is None:
            text = f"no model {name!r} is loaded, and no store has it"
            raise ModelNotFound(text, model_id=ModelId(name))
        reasons = self._list_failures()
        if package is None:
            assert record is not None  # noqa: S101 - see above
            row = self._describe_record(record, reasons)
        else:
            records = self._list_records_by_key().get(package.key, [])
            row = self._describe_package(package, records, reasons)
            record = record or next(iter(records), None)
        return {
            **row,
            "size": self._describe_size(name, record),
            "call": self._find_call(name, row),
        }

    async def _find_package(self, name: str, record: ModelRecord | None) -> StorePackage | None:
        """Return the package of a model. Return None for a model that no store has."""
        if self._catalogue is None or (record is not None and record.key is None):
            return None
        key = self._find_key(name) if record is None else record.key
        if key is None or key.store not in self._catalogue.stores:
            return None
        return await self._catalogue.describe(key)

    def _find_key(self, name: str) -> ArtifactKey | None:
        """Return the key that a name means: STORE/KEY, or KEY of the store without a name."""
        assert self._catalogue is not None  # noqa: S101 - only called with one
        store, _, path = name.partition("/")
        try:
            if store and path and store in self._catalogue.stores:
                return ArtifactKey(store, parse_artifact_path(path))
            return ArtifactKey("", parse_artifact_path(name))
        except InvalidRequest:
            return None

    # -- what control knows -----------------------------------------------------------------

    def _list_records_by_key(self) -> dict[ArtifactKey, list[ModelRecord]]:
        """Return the models in memory, or on their way, by the key of their package."""
        records: dict[ArtifactKey, list[ModelRecord]] = {}
        for record in self._registry.records():
            if record.key is not None and self._registry.get(record.id) is record:
                records.setdefault(record.key, []).append(record)
        return records

    def _list_failures(self) -> dict[str, tuple[str, bool]]:
        """Return why models are not loaded, by name, and whether they are given up."""
        failures: dict[str, tuple[str, bool]] = {}
        for failure in self._history.failures({"load", "fetch"}):
            if failure.model_id is not None and not failure.is_mended:
                failures.setdefault(failure.model_id, (failure.reason, False))
        for model_id, model in self._state.forgotten().items():
            failures[model_id] = (model.reason, model.is_given_up)
        return failures

    def _describe_package(
        self,
        package: StorePackage,
        records: list[ModelRecord],
        failures: Mapping[str, tuple[str, bool]],
    ) -> dict[str, Any]:
        """Return the row of a package of a store, and of the models that were loaded from it."""
        on_disk = package.on_disk
        row = self._describe_names(str(package.key), records, failures)
        if row["where"] == "store" and on_disk is not None:
            row["where"] = "disk"
        if row["last_used"] is None and on_disk is not None:
            row["last_used"] = _format_time(on_disk.last_used)
        return {
            **row,
            "store": package.key.store,
            "key": package.key.path,
            "package_bytes": package.size_bytes,
            "disk_bytes": None if on_disk is None else on_disk.size_bytes,
            "etag": package.etag,
            "modified": None if package.modified is None else _format_time(package.modified),
            "is_outdated": _is_outdated(package),
        }

    def _describe_record(
        self, record: ModelRecord, failures: Mapping[str, tuple[str, bool]]
    ) -> dict[str, Any]:
        """Return the row of a model whose files are in no store, or in none that answers."""
        files = {
            "store": None,
            "key": None,
            "package_bytes": None,
            "disk_bytes": self._state.size_of(record).disk_bytes or None,
            "etag": None,
            "modified": None,
            "is_outdated": False,
        }
        return {**self._describe_names(record.id, [record], failures), **files}

    def _describe_names(
        self, name: str, records: list[ModelRecord], failures: Mapping[str, tuple[str, bool]]
    ) -> dict[str, Any]:
        """Return what is known of a model by its names: its own, and those of its records."""
        names = [*(record.id for record in records), name]
        reason, is_given_up = next(
            (failures[each] for each in names if each in failures), (None, False)
        )
        states = [record.state.value for record in records if record.state is not None]
        memory = [self._state.held(record) for record in records]
        used_at = max((record.usage.used_at for record in records), default=0.0)
        return {
            "name": name,
            "loaded_as": [record.id for record in records],
            "where": "memory" if states else "store",
            "state": next(iter(states), None),
            "reason": reason,
            "is_given_up": is_given_up,
            "is_pinned": self._is_pinned(names),
            "is_kept": any(record.loaded_for is LoadedFor.PLATFORM for record in records),
            "memory_bytes": sum(sum(each.values()) for each in memory) if states else None,
            "last_used": _format_time(_to_wall_time(used_at)) if used_at else None,
        }

    def _is_pinned(self, names: list[str]) -> bool:
        """Return whether the setting `pin` has one of the names."""
        stores = self._state.stores
        return stores is not None and any(stores.is_pinned(ModelId(name)) for name in names)

    def _describe_size(self, name: str, record: ModelRecord | None) -> dict[str, Any]:
        """Return how much memory the model takes or took, and how that is known."""
        size = None if record is None else self._state.size_of(record)
        model_id = ModelId(name) if record is None else record.id
        return {
            "bytes": None if size is None else dict(size.held),
            "basis": None if size is None else size.basis_of_held,
            "declared_bytes": None if size is None else size.declared_bytes,
            "measured_bytes": self._state.measured_bytes("", model_id),
        }

    def _find_call(self, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return where an inference of the model goes: its listener is `http`.

        Where calls of V2 load nothing, a model of a store is called at the endpoint, so that the
        line of `show` also works once the model has left memory.
        """
        if self._is_by_name or row["key"] is None:
            called = row["loaded_as"][0] if row["loaded_as"] else name
            return {"operation": "infer", "model": called}
        endpoint = row["store"] or "any"
        return {"operation": "endpoint", "endpoint": endpoint, "model": row["key"]}


def _is_outdated(package: StorePackage) -> bool:
    """Return whether the store has another version than the disk, or none, as far as is known."""
    on_disk = package.on_disk
    if on_disk is None:
        return False
    return not on_disk.is_current or package.etag not in {None, on_disk.etag}


def _to_wall_time(at: float) -> float:
    """Convert a time of the monotonic clock to a time of day."""
    return clock.wall() - clock.monotonic() + at


def _format_time(at: float) -> str:
    """Write a time of day in ISO 8601, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
