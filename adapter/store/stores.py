"""Opens the store of a location: a folder of this machine, or by obstore with its credentials,
endpoint and time limits.
"""

import os
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapter.errors import InvalidSettings
from adapter.settings.locations import StoreKind, StoreLocation
from adapter.store.folder import FolderStore
from adapter.store.ports import Store

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_MAX_RETRIES = 5
_MAX_CONNECT_SECONDS = 5.0
# An object takes as long as it takes; it is the silence in between that is limited.
_WHOLE_REQUEST = timedelta(days=30)
# Where one of these is set, obstore finds the credentials as the vendor's tools do; it reads no
# profiles.
_WITHOUT_PROFILE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)


def open_store(name: str, location: StoreLocation, timeout_seconds: float) -> Store:
    """Return the store; nothing is asked of it yet. `name` is the setting, for messages.

    Raises InvalidSettings for what cannot work: without obstore, and for settings that obstore
    refuses.
    """
    if location.is_folder:
        return FolderStore(location)
    if find_spec("obstore") is None:
        raise InvalidSettings(
            [f"{name}: {location} needs the extra store: in a clone pip install '.[store]'"]
        )
    from adapter.store.bucket import RemoteStore  # noqa: PLC0415 - obstore is an extra

    try:
        return RemoteStore(location, _make_object_store(location, timeout_seconds))
    except Exception as error:
        kind = type(error).__name__  # the error's text may have a secret in it
        raise InvalidSettings([f"{name}: {location} cannot be used: {kind}"]) from error


def _make_object_store(location: StoreLocation, timeout_seconds: float) -> "ObjectStore":
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store  # noqa: PLC0415

    timeout = timedelta(seconds=timeout_seconds)
    client: ClientConfig = {
        "timeout": _WHOLE_REQUEST,
        "read_timeout": timeout,
        "connect_timeout": min(timeout, timedelta(seconds=_MAX_CONNECT_SECONDS)),
        "allow_http": _is_http(location),
    }
    retry: RetryConfig = {"max_retries": _MAX_RETRIES, "retry_timeout": timeout}
    options: dict[str, Any] = {"client_options": client, "retry_config": retry}
    prefix: dict[str, Any] = {"prefix": location.prefix} if location.prefix else {}
    if location.kind is StoreKind.HTTP:
        return HTTPStore(location.base, **options)
    if location.kind is StoreKind.AZURE:
        return AzureStore(location.base, **prefix, **options)
    if location.kind is StoreKind.GCS:
        return GCSStore(location.base, **_read_google_options(), **prefix, **options)
    return S3Store(location.base, **_read_amazon_options(), **prefix, **options)


def _is_http(location: StoreLocation) -> bool:
    """Return whether the operator has named an address without TLS."""
    names = {
        StoreKind.S3: ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        StoreKind.GCS: ("STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL"),
        StoreKind.AZURE: ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }.get(location.kind, ())
    named = next((os.environ[name] for name in names if os.environ.get(name)), location.base)
    return named.startswith("http://")


def _read_google_options() -> dict[str, Any]:
    """Return options for STORAGE_EMULATOR_HOST, by which Google's clients find an emulator."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if not emulator:
        return {}
    url = emulator if "://" in emulator else f"http://{emulator}"
    return {"base_url": url, "skip_signature": True}


def _read_amazon_options() -> dict[str, Any]:
    """Return the region of the environment or the profile, and a provider of the profile's
    credentials. What is not set is left out, as is the provider without boto3, which reads it.
    """
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options = {"region": region} if region else {}
    has_profile = "AWS_PROFILE" in os.environ or any(
        Path(os.environ.get(variable, default)).expanduser().exists()
        for variable, default in (
            ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
            ("AWS_CONFIG_FILE", "~/.aws/config"),
        )
    )
    if not has_profile or any(os.environ.get(name) for name in _WITHOUT_PROFILE):
        return options
    if find_spec("boto3") is None:
        return options
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415

    try:
        provider = Boto3CredentialProvider()
    except ValueError:  # the profile has no credentials; those of the machine may do
        return options
    if not region and provider.config.get("region"):
        options = {"region": provider.config["region"]}
    return {**options, "credential_provider": provider}
