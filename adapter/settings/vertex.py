"""What Vertex AI brings along: the variables of its contract for containers of predictions.

docs/vertex.md has what each does. They mean nothing unless AIP_MODE is PREDICTION.
"""

from collections.abc import Iterator, Mapping

_ALL = "0.0.0.0"  # noqa: S104 - the platform calls from outside
_ROUTES = {
    "AIP_PREDICT_ROUTE": "vertex_predict_route",
    "AIP_HEALTH_ROUTE": "vertex_health_route",
}
_STORAGE = "AIP_STORAGE_URI"


def inherited(environ: Mapping[str, str]) -> Iterator[tuple[str, str, object]]:
    """The variables that are given: name, the setting it stands for, and the value of that."""
    if not _is_on(environ):
        return
    if port := environ.get("AIP_HTTP_PORT"):
        yield "AIP_HTTP_PORT", "http", f"{_ALL}:{port}"
    for variable, setting in _ROUTES.items():
        if route := environ.get(variable):
            yield variable, setting, route
    if url := environ.get(_STORAGE):
        yield _STORAGE, "model_store", url
        yield _STORAGE, "on_demand", True


def problems(values: Mapping[str, object], environ: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the routes. `values`: all that are given, as written."""
    routes = {setting: values.get(setting) for setting in _ROUTES.values()}
    missing = [name for name, setting in _ROUTES.items() if not routes[setting]]
    if len(missing) == 1 or (missing and _is_on(environ)):
        rule = f"not set: {' and '.join(_ROUTES)} ({' and '.join(routes)}) go together"
        return [f"environment {name}: {rule}" for name in missing]
    if not missing and len({*routes.values()}) == 1:
        return [f"{' and '.join(routes)}: {values['vertex_predict_route']!r}: they must differ"]
    return []


def _is_on(environ: Mapping[str, str]) -> bool:
    return environ.get("AIP_MODE") == "PREDICTION"
