"""Parses clients' JSON in control calls."""

import json
from typing import Any

from adapter.errors import InvalidRequest, PayloadTooLarge

_MAX_PARTS, _MAX_DIGITS, _PIECE_BYTES = 100_000, 400, 2**20


def parsed(text: str | bytes, what: str) -> Any:
    """InvalidRequest where it is not JSON, PayloadTooLarge where it has far more parts than a
    control call needs: the parser blocks the event loop, and makes gigabytes of 60 MB of `{},`.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    parts = 0
    for at in range(0, len(raw), _PIECE_BYTES):
        parts += sum(raw.count(mark, at, at + _PIECE_BYTES) for mark in b"{[,")
        if parts > _MAX_PARTS:
            raise PayloadTooLarge(
                f"{what} has more than {_MAX_PARTS} of the characters {{ [ and ,; at most so many "
                "are accepted"
            )
    try:
        return json.loads(text, parse_int=_int, parse_float=_float, object_hook=_same)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from error


def _int(text: str) -> int:
    """Python's own limit is ten times as high, and time grows with the square of the digits."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; at most {_MAX_DIGITS} are accepted")
    return int(text)


# In a thread the parser gives way to the event loop only where it calls Python.
def _float(text: str) -> float:
    return float(text)


def _same(found: dict[str, Any]) -> dict[str, Any]:
    return found


def json_object(text: str | bytes, what: str) -> dict[str, Any]:
    found = parsed(text, what)
    if not isinstance(found, dict):
        raise InvalidRequest(f"{what} must be a JSON object")
    return found
