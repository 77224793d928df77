"""The settings in force, for whoever looks."""

from typing import Any

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
