"""Reads the variables of Vertex AI's contract for prediction containers (docs/vertex.md).

They mean nothing unless AIP_MODE is PREDICTION.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_ALL = "0.0.0.0"  # noqa: S104 - the platform calls from outside
_PREDICT, _HEALTH = "AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"
_STORAGE = "AIP_STORAGE_URI"
_ROUTE = re.compile(r"/[A-Za-z0-9._~:@/-]*[A-Za-z0-9._~:@-]")


@dataclass(frozen=True, slots=True)
class VertexRoutes:
    """The paths at `http` where Vertex AI sends predictions and asks for health."""

    predict: str
    health: str


def routes(environ: Mapping[str, str]) -> VertexRoutes | None:
    """Return the routes, None without AIP_MODE=PREDICTION. `problems` checks them."""
    if not _is_on(environ):
        return None
    return VertexRoutes(environ.get(_PREDICT, ""), environ.get(_HEALTH, ""))


def inherited(environ: Mapping[str, str]) -> Iterator[tuple[str, str, object]]:
    """Yield each variable that stands for a setting: its name, the setting, and the value."""
    if not _is_on(environ):
        return
    if port := environ.get("AIP_HTTP_PORT"):
        yield "AIP_HTTP_PORT", "http", f"{_ALL}:{port}"
    if url := environ.get(_STORAGE):
        yield _STORAGE, "model_store", url
        yield _STORAGE, "on_demand", True


def problems(environ: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the routes."""
    if not _is_on(environ):
        return []
    found = []
    for variable in (_PREDICT, _HEALTH):
        if not (route := environ.get(variable)):
            found.append(f"environment {variable}: not set: AIP_MODE=PREDICTION needs both routes")
        elif not _ROUTE.fullmatch(route):
            found.append(
                f"environment {variable}: {route!r}: write a path such as /v1/predict: more than a"
                " slash, without one at its end, of letters, digits and ._~:@-/"
            )
    if not found and environ[_PREDICT] == environ[_HEALTH]:
        found.append(f"environment {_HEALTH}: {environ[_HEALTH]!r}: must differ from {_PREDICT}")
    return found


def _is_on(environ: Mapping[str, str]) -> bool:
    return environ.get("AIP_MODE") == "PREDICTION"
