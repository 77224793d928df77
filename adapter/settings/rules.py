"""Checks settings against each other: rules that no single field can state."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationInfo, field_validator

from adapter.settings.locations import Endpoint, StoreLocation
from adapter.settings.modelmesh import refuse_capacity
from adapter.settings.values import Address, parse_endpoint_key

EXTERNAL_REPOSITORY = Path("/models/_triton_models")
# They change what is served, so that without a store they are an error.
_NEED_A_STORE = (
    *("on_demand", "endpoint_keys", "preload", "pin"),
    *("idle_unload_seconds", "revalidate_seconds"),
)
_OF_NO_USE_WITHOUT = (
    *("cache_dir", "cache_limit", "fetch_concurrency", "store_timeout_seconds"),
    "model_wait_seconds",
)
_OFF = frozenset({"", "0", "0.0", "false", "off", "no", "()", "[]", "none"})
_ENDPOINTS_OF_S3 = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class Rules(BaseModel):
    """Base of Settings with its rules. A rule sees the fields that are declared before its own."""

    @field_validator("triton_http", "triton_grpc", "triton_metrics", check_fields=False)
    @classmethod
    def _known_port(cls, address: Address, info: ValidationInfo) -> Address:
        if address.port == 0 and info.data.get("triton") == "external":
            raise ValueError("port 0 (any free one) needs triton=embedded")
        return address

    @field_validator("endpoint_keys", check_fields=False)
    @classmethod
    def _keys_with_secrets(cls, keys: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        environ = (info.context or {}).get("environ", {})
        names = [parse_endpoint_key(key, environ).access_key for key in keys]
        if len(set(names)) < len(names):
            raise ValueError("an access key is there twice")
        return keys

    @field_validator("drain_min_seconds", check_fields=False)
    @classmethod
    def _time_left_to_drain(cls, seconds: float, info: ValidationInfo) -> float:
        limit = info.data.get("drain_timeout_seconds", seconds)
        if seconds > limit:
            raise ValueError(f"longer than drain_timeout_seconds, {limit:g}")
        return seconds

    @field_validator("staging", check_fields=False)
    @classmethod
    def _upload_to_another(cls, staging: str, info: ValidationInfo) -> str:
        if staging == "upload" and info.data.get("triton") == "embedded":
            raise ValueError("upload needs triton=external: the embedded one shares the disk")
        return staging

    @field_validator("repository", check_fields=False)
    @classmethod
    def _shared_repository(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        is_shared = info.data.get("triton") == "external" and info.data.get("staging") != "upload"
        return EXTERNAL_REPOSITORY if path is None and is_shared else path

    @field_validator("modelmesh_memory", check_fields=False)
    @classmethod
    def _enough_for_the_mesh(cls, size: int | None, info: ValidationInfo) -> int | None:
        needed = ("modelmesh_memory_buffer", "modelmesh_default_size")
        if size is not None and all(name in info.data for name in needed):
            buffer, default = (info.data[name] for name in needed)
            refuse_capacity(size - buffer, default)
        return size

    @field_validator("memory_source", mode="before", check_fields=False)
    @classmethod
    def _check_source(cls, value: object, info: ValidationInfo) -> object:
        if value == "host" and info.data.get("triton") == "external":
            raise ValueError("host needs triton=embedded: another container's processes are unseen")
        return "off" if value is False else value  # YAML reads off as False


def without_a_store(values: Mapping[str, object]) -> Sequence[str]:
    """Return the settings that need a store, if none is set. `values`: all that are set."""
    if values.get("model_store") or values.get("endpoints"):
        return ()
    return [n for n in _NEED_A_STORE if n in values and str(values[n]).lower() not in _OFF]


def store_problems(values: Mapping[str, object], environ: Mapping[str, str]) -> list[str]:
    """Return the problems of variables that stores read by themselves."""
    if "s3://" not in f"{values.get('model_store')} {values.get('endpoints')}":
        return []
    return [
        f"environment {name}: {address!r}: write http://HOST:PORT or https://HOST:PORT"
        for name in _ENDPOINTS_OF_S3
        if (address := environ.get(name)) and not address.startswith(("http://", "https://"))
    ]


def store_warnings(
    model_store: StoreLocation | None, endpoints: Sequence[Endpoint], given: Mapping[str, object]
) -> list[str]:
    """Return what may be intended, or be repaired while the adapter runs."""
    stores = [("model_store", model_store)] if model_store else []
    stores += [(f"endpoints, {each.name}", each.models) for each in endpoints]
    found = [f"{name}: {why}" for name, store in stores if (why := _why_unusable(store))]
    if not stores:
        unused = (name for name in _OF_NO_USE_WITHOUT if name in given)
        found += [f"{name}: of no use without model_store or endpoints" for name in unused]
    return found


def _why_unusable(store: StoreLocation) -> str | None:
    if not store.is_folder:
        return None
    path = os.path.expanduser(store.base)  # noqa: PTH111 - as a text
    if not os.path.exists(path):  # noqa: PTH110
        return f"the folder {store.base} is not there"
    if not os.path.isdir(path):  # noqa: PTH112
        return f"{store.base} is no folder"
    if not os.access(path, os.R_OK | os.X_OK):
        return f"the folder {store.base} cannot be read by this user"
    return None
