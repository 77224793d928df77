"""The document of docs/openapi.yaml, and the routes that the code has."""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from referencing import Registry
from referencing.jsonschema import DRAFT202012

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "docs" / "openapi.yaml"
HTTP = ROOT / "adapter" / "frontends" / "http"
METHODS = frozenset({"get", "put", "post", "delete", "options", "head", "patch", "trace"})

# Functions that match the segments of a path, and where their first segment stands.
ROUTERS = {
    (HTTP / "sagemaker.py", "handle"): ("",),
    (HTTP / "v2.py", "_route"): ("/v2",),
    (HTTP / "v2.py", "_beyond_models"): ("/v2",),
    (HTTP / "v2.py", "_shared_memory"): ("/v2/systemsharedmemory", "/v2/cudasharedmemory"),
    (HTTP / "v2.py", "of_path"): ("/v2/models",),
    (HTTP / "v2.py", "_of_model"): ("/v2/models/{}", "/v2/models/{}/versions/{}"),
    (HTTP / "endpoint" / "endpoint.py", "handle"): ("",),
}
# Patterns that end in `*rest` hand on to another of these functions.
HANDED_ON = {
    "/v2/models/{*}",
    "/v2/systemsharedmemory/{*}",
    "/v2/cudasharedmemory/{*}",
    "/v2/models/{}/{*}",
    "/v2/models/{}/versions/{}/{*}",
}


def load() -> dict[str, Any]:
    return yaml.load(SOURCE.read_text(encoding="utf-8"), yaml.CSafeLoader)


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    about: dict[str, Any]

    @property
    def tag(self) -> str:
        return self.about["tags"][0]

    @property
    def statuses(self) -> set[int]:
        return {int(status) for status in self.about["responses"]}


def operations(document: dict[str, Any]) -> list[Operation]:
    return [
        Operation(method.upper(), path, about)
        for path, item in document["paths"].items()
        for method, about in item.items()
        if method in METHODS
    ]


DOCUMENT = load()
_URI = "urn:openapi"
# for validators of JSON Schema, with schemas that are `at_home`
REGISTRY = Registry().with_resource(_URI, DRAFT202012.create_resource(DOCUMENT))


def at_home(schema: Any) -> Any:
    """The schema with its references made absolute."""
    return json.loads(json.dumps(schema).replace('"#/', f'"{_URI}#/'))


def resolved(found: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in found:
        part: Any = DOCUMENT
        for key in found["$ref"].removeprefix("#/").split("/"):
            part = part[key]
        found = part
    return found


def without_names(path: str) -> str:
    """`/models/{NAME}` as `/models/{}`."""
    return "/".join("{}" if part.startswith("{") else part for part in path.split("/"))


def routes_of_http() -> set[str]:
    """What the code matches, with `{}` for each name; it is read, not run."""
    found = set()
    for (file, function), prefixes in ROUTERS.items():
        for path, is_of_versions in _patterns(file, function):
            found |= {
                f"{prefix}{path}"
                for prefix in prefixes
                if is_of_versions or not prefix.endswith("/versions/{}")
            }
    return found - HANDED_ON


def _patterns(file: Path, function: str) -> Iterator[tuple[str, bool]]:
    """Each path, and whether it may stand behind a version of a model."""
    [body] = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
    ]
    for case in (node for node in ast.walk(body) if isinstance(node, ast.match_case)):
        guard = "" if case.guard is None else ast.unparse(case.guard)
        yield from ((path, guard != "not version") for path in _paths(case.pattern))


def _paths(pattern: ast.pattern) -> Iterator[str]:
    match pattern:
        case ast.MatchOr(patterns):
            for each in patterns:
                yield from _paths(each)
        case ast.MatchSequence(parts):
            paths = [""]
            for part in parts:
                paths = [f"{path}/{segment}" for path in paths for segment in _segments(part)]
            yield from paths


def _segments(pattern: ast.pattern) -> list[str]:
    match pattern:
        case ast.MatchValue(ast.Constant(str(text))):
            return [text]
        case ast.MatchStar():
            return ["{*}"]
        case ast.MatchAs(None):
            return ["{}"]
        case ast.MatchAs(inner):
            return _segments(inner)
        case ast.MatchOr(patterns):
            return [segment for each in patterns for segment in _segments(each)]
    raise AssertionError(ast.dump(pattern))
