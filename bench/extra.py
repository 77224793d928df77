"""Imports libraries of the extra `bench` when they are used."""

from importlib import import_module
from typing import Any

from adapter.errors import InvalidSettings


def needed(module: str) -> Any:
    """InvalidSettings, naming the extra, when the library is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise InvalidSettings(
            [f"{name} is not installed; in a clone: pip install '.[bench]'"]
        ) from error
