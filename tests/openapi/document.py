"""The document of docs/openapi.yaml."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from referencing import Registry
from referencing.jsonschema import DRAFT202012

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "docs" / "openapi.yaml"
METHODS = frozenset({"get", "put", "post", "delete", "options", "head", "patch", "trace"})


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
