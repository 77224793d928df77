"""The settings in force, for whoever looks."""

import shlex
from typing import Any

from adapter.settings.model import Settings
from adapter.settings.sources import Loaded


def masked(name: str, value: object) -> object:
    is_secret = name.endswith(("_token", "_password", "_secret"))
    return "***" if is_secret and value is not None else value


def for_programs(loaded: Loaded) -> dict[str, Any]:
    """Each setting's value and origin, as JSON has them."""
    return {
        name: {"value": _plain(masked(name, value)), "origin": loaded.origins[name]}
        for name, value in loaded.settings
    }


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return value if isinstance(value, bool | int | float | None) else str(value)


def as_text(name: str, value: object) -> str:
    """The value of a setting for people: a default as it was written, or a validated value."""
    if value is None:
        return str(dict(Settings.model_fields[name].json_schema_extra or {})["unset"])  # type: ignore[arg-type]
    if isinstance(value, tuple):
        return " ".join(shlex.quote(str(item)) for item in value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
