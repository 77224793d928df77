"""Renders the settings in force for people and programs."""

import shlex
from typing import Any

from adapter.core.sizing import exact_size
from adapter.settings.model import SECRETS, Settings, metavar_of, unset_of
from adapter.settings.sources import Loaded
from adapter.settings.values import Reserve, variable_of


def masked(name: str, value: object) -> object:
    """Return the value, or asterisks for a secret."""
    return "***" if name in SECRETS and value is not None else value


def for_programs(loaded: Loaded) -> dict[str, Any]:
    """Return each setting's value and origin as JSON values."""
    return {
        name: {"value": _plain(masked(name, value)), "origin": loaded.origins[name]}
        for name, value in loaded.settings
    }


def for_people(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Return the name, the value and the origin of each setting. The origin of one without a value
    also says what that means.
    """
    return [
        (name, _with_unit(name, masked(name, value)), _origin(name, value, loaded.origins[name]))
        for name, value in loaded.settings
    ]


def help_of(name: str) -> str:
    """Return the text of a setting for --help."""
    field = Settings.model_fields[name]
    default = as_text(name, field.default)
    return f"{field.description} (default: {default}; environment: {variable_of(name)})"


def _with_unit(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Reserve) and not value.percent:
        return exact_size(value.size_bytes)
    text = as_text(name, value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if metavar_of(name) == "SIZE":
            return exact_size(int(value))
        return f"{text} s" if metavar_of(name) == "SECONDS" else text
    return text


def _origin(name: str, value: object, origin: str) -> str:
    return f"{origin}: {as_text(name, None)}" if value is None else origin


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return value if isinstance(value, bool | int | float | None) else str(value)


def as_text(name: str, value: object) -> str:
    """Return the value of a setting for people: a default as written, or a validated value."""
    if value is None:
        return unset_of(name)
    if isinstance(value, tuple):
        return " ".join(shlex.quote(str(item)) for item in value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
