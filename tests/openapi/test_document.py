"""docs/openapi.yaml is valid, has every route and no other, and the codes of the error tables."""

import json
import tomllib
import zipfile
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from adapter.frontends import status
from adapter.frontends.routes import ADMIN_ROUTES, ROUTES
from tests.cases import rows
from tests.openapi.document import (
    DOCUMENT,
    REGISTRY,
    ROOT,
    Operation,
    at_home,
    operations,
    resolved,
    without_names,
)

OPERATIONS = operations(DOCUMENT)
# Codes that no HTTP listener answers with: they are of streams over gRPC, and of calls of gRPC.
OVER_GRPC = {"NotTaken"}
# Answers with an error status that may have no body.
WITHOUT_BODY = {("/ping", "503")}


def answers(operation: Operation) -> Iterator[tuple[str, dict[str, Any]]]:
    for code, answer in operation.about["responses"].items():
        yield code, resolved(answer)


def codes_in(schema: object) -> set[str]:
    """The error codes that a schema of an answer names."""
    if isinstance(schema, list):
        return {code for each in schema for code in codes_in(each)}
    if not isinstance(schema, dict):
        return set()
    named = schema.get("properties", {}).get("code", {}).get("enum", ())
    return {*named, *codes_in(schema.get("anyOf", []))}


def examples() -> Iterator[Any]:
    """Each example with its schema."""

    def walk(found: Any) -> Iterator[Any]:
        if isinstance(found, dict):
            if "example" in found and "schema" in found:
                yield found["schema"], found["example"]
            for value in found.values():
                yield from walk(value)
        elif isinstance(found, list):
            for value in found:
                yield from walk(value)

    yield from walk(DOCUMENT["paths"])
    yield from walk(DOCUMENT["components"])


def test_it_is_a_valid_document_of_openapi():
    import openapi_spec_validator  # here, as jsonschema costs each process of tests seconds

    openapi_spec_validator.validate(DOCUMENT)


def test_openapi_has_exactly_the_callers_routes():
    routes = {(route.method, without_names(route.path)) for route in ROUTES}

    found = {(each.method, without_names(each.path)) for each in OPERATIONS if each.tag != "admin"}
    assert found == routes


def test_openapi_has_exactly_the_operators_routes():
    routes = {(route.method, route.path) for route in ADMIN_ROUTES.values()}

    found = {(each.method, each.path) for each in OPERATIONS if each.tag == "admin"}
    assert found | {("GET", "/"), ("GET", "/openapi.json")} == routes


def test_openapi_has_the_error_tables_codes():
    codes = {code for _, code in status.HTTP.values()} | {"InternalError"}

    assert set(DOCUMENT["components"]["schemas"]["ErrorCode"]["enum"]) == codes


@rows("operation", OPERATIONS)
def test_an_answer_has_codes_of_its_status_alone(operation):
    of_status = {(str(number), code) for number, code in status.HTTP.values()}
    of_status |= {("500", "InternalError")}

    for number, answer in answers(operation):
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        assert {(number, code) for code in codes_in(schema)} <= of_status


def test_every_code_is_an_answer_of_some_call():
    found = {
        code
        for each in OPERATIONS
        for _, answer in answers(each)
        for code in codes_in(answer.get("content", {}).get("application/json", {}).get("schema"))
    }

    assert found | OVER_GRPC | {"MethodNotAllowed"} == set(
        DOCUMENT["components"]["schemas"]["ErrorCode"]["enum"]
    )


def test_openapi_has_the_endpoints_statuses():
    statuses = {number for number, _ in status.AWS.values()} - {404}

    for each in OPERATIONS:
        if each.path.endswith(("invocations", "response-stream")) and each.tag == "endpoint":
            assert statuses <= each.statuses or "async" in each.path


@rows("operation", OPERATIONS)
def test_each_status_and_error_body_is_listed(operation):
    for number, answer in answers(operation):
        assert HTTPStatus(int(number)) if number != "530" else True
        is_error = int(number) >= 400
        assert "content" in answer or not is_error or (operation.path, number) in WITHOUT_BODY


@rows("operation", OPERATIONS)
def test_closed_objects_are_closed_in_openapi(operation):
    """V2 answers are Triton's, which may grow; what is below them is not looked at."""
    for number, answer in answers(operation):
        if operation.tag in {"v2", "triton", "about"} and number == "200":
            continue
        if operation.path.endswith(("invoke", "invocations")) and number == "200":
            continue
        for content in answer.get("content", {}).values():
            assert_closed(content.get("schema", {}))


def assert_closed(schema: dict[str, Any]) -> None:
    found = resolved(schema)
    for each in found.get("anyOf", []):
        assert_closed(each)
    if found.get("type") == "object":
        assert "additionalProperties" in found, found
    for each in found.get("properties", {}).values():
        assert_closed(each)
    if isinstance(found.get("additionalProperties"), dict):
        assert_closed(found["additionalProperties"])
    if "items" in found:
        assert_closed(found["items"])


def test_openapi_values_have_one_type_each():
    def walk(found: Any) -> Iterator[Any]:
        yield found
        for value in found.values() if isinstance(found, dict) else found:
            if isinstance(value, dict | list):
                yield from walk(value)

    types = [each["type"] for each in walk(DOCUMENT) if isinstance(each, dict) and "type" in each]
    several = [each for each in types if isinstance(each, list) and len({*each} - {"null"}) > 1]
    assert len(types) > 100
    assert several == []


@rows(("schema", "example"), [*examples()])
def test_each_example_is_what_its_schema_says(schema, example):
    import jsonschema

    jsonschema.Draft202012Validator(at_home(schema), registry=REGISTRY).validate(example)


def test_its_version_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert DOCUMENT["info"]["version"] == project["version"]


def test_the_wheel_has_the_document_as_json(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])

    with zipfile.ZipFile(wheel) as archive:
        assert json.loads(archive.read("adapter/frontends/openapi.json")) == DOCUMENT
    assert [*tmp_path.iterdir()] == [Path(wheel)]
