"""What is wrong with settings of stores that no single one of them shows."""

import os
from collections.abc import Mapping, Sequence

from adapter.settings.locations import StoreLocation
from adapter.settings.model import Settings

# They change what is served, so that without a store somebody would wait for it in vain.
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


def without_a_store(values: Mapping[str, object]) -> Sequence[str]:
    """Return the settings that are given in vain. `values`: all that are given, as written."""
    if values.get("model_store") or values.get("endpoints"):
        return ()
    return [n for n in _NEED_A_STORE if n in values and str(values[n]).lower() not in _OFF]


def problems(values: Mapping[str, object], environ: Mapping[str, str]) -> list[str]:
    """Return what is wrong with variables that stores read by themselves."""
    if "s3://" not in f"{values.get('model_store')} {values.get('endpoints')}":
        return []
    return [
        f"environment {name}: {address!r}: write http://HOST:PORT or https://HOST:PORT"
        for name in _ENDPOINTS_OF_S3
        if (address := environ.get(name)) and not address.startswith(("http://", "https://"))
    ]


def warnings(settings: Settings, given: Mapping[str, object]) -> list[str]:
    """Return what is odd, but may be as somebody wants it, or be mended while the adapter runs."""
    stores = [("model_store", settings.model_store)] if settings.model_store else []
    stores += [(f"endpoints, {each.name}", each.models) for each in settings.endpoints]
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
