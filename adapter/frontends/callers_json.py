"""Parses clients' JSON in control calls."""

import json
from typing import Any

from adapter.errors import InvalidRequest, PayloadTooLarge

_MAX_PARTS = 100_000


def parsed(text: str | bytes, what: str) -> Any:
    """InvalidRequest where it is not JSON, PayloadTooLarge where it has far more parts than a
    control call needs: the parser blocks the event loop, and makes gigabytes of 60 MB of `{},`.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    parts = sum(raw.count(mark) for mark in b"{[,")
    if parts > _MAX_PARTS:
        raise PayloadTooLarge(
            f"{what} has {parts} of the characters {{ [ and ,; at most {_MAX_PARTS} are accepted"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from error


def json_object(text: str | bytes, what: str) -> dict[str, Any]:
    found = parsed(text, what)
    if not isinstance(found, dict):
        raise InvalidRequest(f"{what} must be a JSON object")
    return found
