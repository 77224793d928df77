"""Writes what the chart says about its values: the table of README.md and values.schema.json.

Both come from the comments of charts/triton-adapter/values.yaml; what may stand under `settings`
comes from the adapter's Settings. A value without a comment is an error.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from adapter.settings import Address, Reserve, Settings, as_text
from adapter.settings.locations import Endpoint, StoreLocation
from adapter.settings.values import SingleModel

CHART = Path(__file__).resolve().parent.parent / "charts" / "triton-adapter"
BEGIN, END = "<!-- values: written by scripts/gen_chart_readme.py -->", "<!-- end of values -->"
# what YAML makes of words without quotes
READ_AS = {"on": True, "off": False}
TYPES = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}

# What the chart decides: where Triton is, and what both containers must see at one path.
CHARTS_OWN = {
    "triton", "triton_http", "triton_grpc", "triton_metrics", "tritonserver", "triton_args",
    "repository", "control_token", "cache_dir",
}  # fmt: skip
LINES = {"type": ["array", "string"], "items": {"type": "string"}}
# NAME: URL and NAME: {models: URL}, or lines of NAME=URL
ENDPOINTS = {
    "type": ["object", "array", "string"],
    "items": {"type": "string"},
    "additionalProperties": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "additionalProperties": False,
                "required": ["models"],
                "properties": {"models": {"type": "string"}},
            },
        ]
    },
}


@dataclass(frozen=True, slots=True)
class Value:
    """One key of values.yaml. `inner` are the keys below, None where the user's own begin."""

    path: str
    default: Any
    meaning: str
    rule: Any
    inner: list["Value"] | None


def read_values() -> list[Value]:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    return _values(yaml.compose(text), text.splitlines(), "")


def _values(node: yaml.MappingNode, lines: list[str], above: str) -> list[Value]:
    found = []
    for key, value in node.value:
        path = f"{above}{key.value}"
        meaning, rule = _comment(lines, key.start_mark.line)
        is_group = not meaning and isinstance(value, yaml.MappingNode) and value.value
        inner = _values(value, lines, f"{path}.") if is_group else None
        if not meaning and inner is None:
            raise SystemExit(f"values.yaml: {path}: no comment `# -- ...` above it")
        found.append(Value(path, _plain(value), meaning, rule, inner))
    return found


def _plain(node: yaml.Node) -> Any:
    return yaml.safe_load(yaml.serialize(node))


def _comment(lines: list[str], line: int) -> tuple[str, Any]:
    meaning, rule = "", {}
    for text in reversed(lines[:line]):
        bare = text.strip()
        if bare.startswith("# -- "):
            return bare.removeprefix("# -- "), rule
        if not bare.startswith("# @schema "):
            break
        rule = yaml.safe_load(bare.removeprefix("# @schema "))
    return meaning, rule


def schema() -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart triton-adapter",
        **_closed(read_values()),
    }


def _closed(values: list[Value]) -> dict[str, Any]:
    properties = {value.path.rpartition(".")[2]: _schema(value) for value in values}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema(value: Value) -> dict[str, Any]:
    if value.inner is not None:
        return _closed(value.inner) | value.rule
    meaning = {"description": value.meaning.replace("`", "")}
    if value.rule == "settings":
        return meaning | _settings_schema()
    kind = {} if value.default is None else {"type": TYPES[type(value.default)]}
    return meaning | kind | value.rule


def _settings_schema() -> dict[str, Any]:
    properties = {
        name: {"description": f"{field.description} (default: {as_text(name, field.default)})"}
        | _shape(field.annotation)
        for name, field in Settings.model_fields.items()
        if name not in CHARTS_OWN
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _shape(annotation: Any) -> dict[str, Any]:
    """What YAML may say for it; the adapter itself checks the rest."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _shape(inner[0])
    if origin in {Union, UnionType}:
        given = [kind for kind in inner if kind is not type(None)]
        return _shape(given[0])
    if origin is Literal:
        return {"enum": [*inner, *(made for text, made in READ_AS.items() if text in inner)]}
    if origin is tuple or annotation is SingleModel:
        return ENDPOINTS if Endpoint in inner else LINES
    simple = {
        bool: "boolean",
        float: "number",
        Path: "string",
        str: "string",
        StoreLocation: "string",
    }
    if annotation in simple:
        return {"type": simple[annotation]}
    if annotation is Address:
        return {"anyOf": [{"type": "string"}, {"const": False}]}
    if annotation in {int, Reserve}:  # a size, a count or a share
        return {"type": ["integer", "string"]}
    raise SystemExit(f"{annotation}: say in _shape what YAML may hold for this type")


def table() -> str:
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for value in _leaves(read_values()):
        cells = f"`{value.path}`", f"`{json.dumps(value.default)}`", value.meaning
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _leaves(values: list[Value]) -> Iterator[Value]:
    for value in values:
        if value.inner is None:
            yield value
        else:
            yield from _leaves(value.inner)


def pages() -> dict[Path, str]:
    readme = CHART / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return {
        readme: f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}",
        CHART / "values.schema.json": json.dumps(schema(), indent=2) + "\n",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    is_check = parser.parse_args().check
    diffs = []
    for path, wanted in pages().items():
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = found.splitlines(keepends=True), wanted.splitlines(keepends=True)
        diffs += difflib.unified_diff(*lines, path.name, "as it should be")
        if not is_check:
            path.write_text(wanted, encoding="utf-8")
    print("".join(diffs) if is_check else "", end="")
    return 1 if is_check and diffs else 0


if __name__ == "__main__":
    sys.exit(main())
