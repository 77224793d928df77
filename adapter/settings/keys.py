"""The keys of callers of the endpoint: `ACCESS_KEY env:VARIABLE|file:PATH PATTERN...`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_ACCESS_KEY = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_WORDS = 3
_FORM = "write ACCESS_KEY, env:VARIABLE or file:PATH of its secret, and patterns of TargetModel"


@dataclass(frozen=True, slots=True)
class EndpointKey:
    """`models`: patterns of what it may ask for, with `*` and `?` as in AWS's policies."""

    access_key: str
    secret: str = field(repr=False)
    models: tuple[str, ...]


def parse_endpoint_key(text: str, environ: Mapping[str, str]) -> EndpointKey:
    """Read the secret from where the text says that it is. Raises ValueError."""
    words = text.split()
    if len(words) < _WORDS:
        raise ValueError(_FORM)
    access_key, where, *models = words
    if _ACCESS_KEY.fullmatch(access_key) is None:
        raise ValueError(f"{access_key!r} is no access key: letters, digits, `_`, `.` and `-`")
    return EndpointKey(access_key, _secret(where, environ), tuple(models))


def secret_variables(keys: Iterable[str]) -> frozenset[str]:
    """Return the names of the variables that hold secrets."""
    places = (text.split()[1] for text in keys)
    return frozenset(place.removeprefix("env:") for place in places if place.startswith("env:"))


def _secret(where: str, environ: Mapping[str, str]) -> str:
    kind, _, name = where.partition(":")
    match kind:
        case "env":
            secret = environ.get(name, "")
        case "file":
            try:
                secret = Path(name).read_text(encoding="utf-8").strip()
            except (OSError, ValueError) as error:
                raise ValueError(f"{where}: {error}") from error
        case _:
            raise ValueError(_FORM)
    if not secret:
        raise ValueError(f"{where}: there is no secret")
    return secret
