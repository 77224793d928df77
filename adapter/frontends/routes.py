"""Declares each call of the HTTP, gRPC and admin listeners once, and what it needs.

Access, metrics, traces and the dispatch of requests follow from the table; a test holds
docs/openapi.yaml, which the listeners serve, against it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

import yaml


class Scope(IntEnum):
    """The kinds of routes. `http_data` serves those up to METADATA; CONTROL needs `control_token`,
    and with `endpoint_keys` all but SERVER are refused.
    """

    SERVER = 1  # tells nothing about any model
    INFERENCE = 2
    METADATA = 3  # of models that the caller can name
    READ = 4  # lists models, or reaches Triton through `passthrough`
    CONTROL = 5


SERVER, INFERENCE, METADATA, READ, CONTROL = Scope


@dataclass(frozen=True, slots=True)
class Route:
    """A call over HTTP. `operation` and `contract` are its labels in the metrics. `passthrough`:
    the item of that setting which opens it.
    """

    method: str
    path: str
    operation: str
    scope: Scope
    contract: str = "sagemaker"
    passthrough: str | None = None


def _v2(
    method: str, path: str, operation: str, scope: Scope, passthrough: str | None = None
) -> Route:
    return Route(method, f"/v2{path}", operation, scope, "v2", passthrough)


def _list_model_routes(method: str, path: str, operation: str, scope: Scope) -> Iterator[Route]:
    """Yield the routes of a model, and of a version of it."""
    yield _v2(method, f"/models/{{model_name}}{path}", operation, scope)
    yield _v2(method, f"/models/{{model_name}}/versions/{{version}}{path}", operation, scope)


def _shared_memory(kind: str) -> Iterator[Route]:
    for method, path in (
        ("GET", "/status"),
        ("GET", "/region/{region}/status"),
        ("POST", "/unregister"),
        ("POST", "/region/{region}/register"),
        ("POST", "/region/{region}/unregister"),
    ):
        yield _v2(method, f"/{kind}sharedmemory{path}", "shared_memory", READ, "shared_memory")


def _endpoint(operation: str) -> Route:
    path = f"/endpoints/{{endpoint_name}}/{operation}"
    return Route("POST", path, operation, INFERENCE, "endpoint")


def _openai(method: str, path: str, operation: str, scope: Scope) -> Route:
    return Route(method, f"/v1{path}", operation, scope, "openai")


INVOKE_ENDPOINT = _endpoint("invocations")
STREAM_ENDPOINT = _endpoint("invocations-response-stream")
ASYNC_ENDPOINT = _endpoint("async-invocations")  # refused in AWS's words

ROUTES: Sequence[Route] = (
    Route("GET", "/", "about", SERVER),
    Route("GET", "/openapi.json", "openapi", SERVER),
    Route("GET", "/ping", "ping", SERVER),
    Route("GET", "/models", "list", READ),
    Route("POST", "/models", "load", CONTROL),
    Route("GET", "/models/{model_name}", "get", READ),
    Route("DELETE", "/models/{model_name}", "unload", CONTROL),
    Route("POST", "/models/{model_name}/invoke", "invoke", INFERENCE),
    Route("POST", "/invocations", "invocations", INFERENCE),
    INVOKE_ENDPOINT,
    STREAM_ENDPOINT,
    ASYNC_ENDPOINT,
    _openai("GET", "/models", "list", READ),
    _openai("GET", "/models/{model_name}", "get", METADATA),
    _openai("POST", "/embeddings", "embeddings", INFERENCE),
    _openai("POST", "/classify", "classify", INFERENCE),
    _openai("POST", "/completions", "completions", INFERENCE),
    _openai("POST", "/chat/completions", "chat", INFERENCE),  # refused with the reason
    _v2("GET", "", "server_metadata", SERVER),
    _v2("GET", "/health/live", "live", SERVER),
    _v2("GET", "/health/ready", "server_ready", SERVER),
    _v2("GET", "/models/stats", "all_statistics", METADATA),
    *_list_model_routes("GET", "", "metadata", METADATA),
    *_list_model_routes("GET", "/config", "config", METADATA),
    *_list_model_routes("GET", "/stats", "statistics", METADATA),
    *_list_model_routes("GET", "/ready", "ready", METADATA),
    *_list_model_routes("POST", "/infer", "infer", INFERENCE),
    *_list_model_routes("POST", "/generate", "generate", INFERENCE),
    *_list_model_routes("POST", "/generate_stream", "generate_stream", INFERENCE),
    _v2("POST", "/repository/index", "repository_index", READ),
    _v2("POST", "/repository/models/{model_name}/load", "repository_load", CONTROL),
    _v2("POST", "/repository/models/{model_name}/unload", "repository_unload", CONTROL),
    *_shared_memory("system"),
    *_shared_memory("cuda"),
    _v2("GET", "/models/{model_name}/trace/setting", "trace", READ, "trace"),
    _v2("POST", "/models/{model_name}/trace/setting", "trace", READ, "trace"),
    _v2("GET", "/trace/setting", "trace", READ, "trace"),
    _v2("POST", "/trace/setting", "trace", READ, "trace"),
    _v2("GET", "/logging", "logging", READ, "log"),
    _v2("POST", "/logging", "logging", READ, "log"),
)

# By operation. The first four are at the listener metrics instead, if there is one.
ADMIN_ROUTES: Mapping[str, Route] = {
    operation: Route(method, path, operation, scope, "admin")
    for method, path, operation, scope in (
        ("GET", "/livez", "livez", SERVER),
        ("GET", "/startup", "startup", SERVER),
        ("GET", "/readyz", "readyz", SERVER),
        ("GET", "/metrics", "metrics", SERVER),
        ("GET", "/", "page", READ),
        ("GET", "/openapi.json", "openapi", SERVER),
        ("GET", "/resident", "resident", READ),
        ("GET", "/store/models", "store_models", READ),
        ("GET", "/debug/state", "state", READ),
        ("GET", "/debug/config", "config", READ),
        ("GET", "/debug/tasks", "tasks", READ),
        ("POST", "/drain", "drain", CONTROL),
        ("POST", "/forget", "forget", CONTROL),
        ("POST", "/load", "load", CONTROL),
        ("POST", "/unload", "unload", CONTROL),
        ("POST", "/infer", "infer", CONTROL),
    )
}

# Methods of V2's and ModelMesh's services; CONTROL without a row.
RPCS: Mapping[str, Scope] = {
    **dict.fromkeys(("ServerLive", "ServerReady", "ServerMetadata"), SERVER),
    **dict.fromkeys(("ModelInfer", "ModelStreamInfer"), INFERENCE),
    **dict.fromkeys(("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"), METADATA),
    **dict.fromkeys(("RepositoryIndex", "TraceSetting", "LogSettings"), READ),
    **{
        f"{kind}SharedMemory{act}": READ
        for kind in ("System", "Cuda")
        for act in ("Status", "Register", "Unregister")
    },
}

INFERENCES = frozenset(route.operation for route in ROUTES if route.scope is INFERENCE)
# by the first segment of their paths
CONTRACTS: Mapping[str, str] = {route.path.split("/")[1]: route.contract for route in ROUTES}


# -- which route a path has ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Match:
    """A path of the table. `names`: what the caller has in the place of its placeholders."""

    path: str
    methods: Mapping[str, Route]
    names: Mapping[str, str]

    def below_v2(self) -> str:
        """Return the path of the call as Triton has it, below /v2."""
        quoted = {name: quote(value, safe="") for name, value in self.names.items()}
        return self.path.removeprefix("/v2").format(**quoted)

    def below_model(self) -> str:
        """Return what stands behind the name of the model."""
        return self.path.partition("{model_name}")[2].format(**self.names)


@dataclass(slots=True)
class _Node:
    """A place in the tree of all paths. `name`: the placeholder that `other` stands behind."""

    path: str = ""
    methods: dict[str, Route] = field(default_factory=dict)
    literals: "dict[str, _Node]" = field(default_factory=dict)
    name: str = ""
    other: "_Node | None" = None

    def child(self, segment: str) -> "_Node":
        """Return the place of a segment below this one; make it if there is none."""
        if not segment.startswith("{"):
            return self.literals.setdefault(segment, _Node())
        self.name = segment[1:-1]
        self.other = self.other or _Node()
        return self.other


_Names: TypeAlias = tuple[tuple[str, str], ...]


def _tree() -> _Node:
    root = _Node()
    for route in ROUTES:
        node = root
        for segment in route.path[1:].split("/"):
            node = node.child(segment)
        node.path = route.path
        node.methods[route.method] = route
    return root


_ROOT = _tree()


def find(segments: Sequence[str]) -> Match | None:
    """Return the route of a path that was split and decoded; None if it has none."""
    match segments:
        # no path of OpenAI's goes on behind the name of a model, so a slash in it may stay as it is
        case ["v1", "models", *parts] if parts:
            segments = ["v1", "models", "/".join(parts)]
    match = _find(_ROOT, segments, 0, ())
    if match is None:
        return None
    node, names = match
    return Match(node.path, node.methods, dict(names))


def _find(
    node: _Node, segments: Sequence[str], at: int, names: _Names
) -> tuple[_Node, _Names] | None:
    if at == len(segments):
        return (node, names) if node.methods else None
    segment = segments[at]
    match = None
    if (literal := node.literals.get(segment)) is not None:
        match = _find(literal, segments, at + 1, names)
    if match is None and node.other is not None and _fits(node.name, segment):
        match = _find(node.other, segments, at + 1, (*names, (node.name, segment)))
    return match


def _fits(name: str, segment: str) -> bool:
    return name != "version" or (segment.isascii() and segment.isdigit())


def bare(segments: Sequence[str]) -> list[str]:
    """Return the path without a slash at its end, which means nothing."""
    return list(segments[:-1] if len(segments) > 1 and not segments[-1] else segments)


# -- their description --------------------------------------------------------------------------

_BUILT = Path(__file__).with_name("openapi.json")  # in a wheel, by scripts/build_hook.py
_SOURCE = Path(__file__).parents[2] / "docs" / "openapi.yaml"  # of a checkout


@cache
def openapi() -> bytes:
    """Return the OpenAPI document as JSON."""
    if _BUILT.exists():
        return _BUILT.read_bytes()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document = yaml.load(_SOURCE.read_bytes(), loader)  # noqa: S506 - both loaders are safe ones
    return json.dumps(document).encode()
