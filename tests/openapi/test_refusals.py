"""Answers that schemathesis does not get: without the token or a signature, and of a drain."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.openapi.document import DOCUMENT, REGISTRY, at_home, operations, resolved
from tests.running import COMPLETE, EXAMPLES, Client, Reply, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

TOKEN = "a-token-of-these-tests"  # noqa: S105 - it opens nothing else
NAMES = {"NAME": "identity", "VERSION": "1", "REGION": "r", "ENDPOINT": "any"}
OPERATIONS = {each.about["operationId"]: each for each in operations(DOCUMENT)}


def security(operation: Any) -> list[dict[str, Any]]:
    return operation.about.get("security", [])


CONTROLLED = [name for name, each in OPERATIONS.items() if {"controlToken": []} in security(each)]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAdapter]:
    token = tmp_path_factory.mktemp("secret") / "token"
    token.write_text(TOKEN)
    store = (f"--model-store={EXAMPLES}", f"--cache-dir={tmp_path_factory.mktemp('cache')}")
    keys = "--endpoint-keys=AKID env:SECRET_OF_TESTS *"
    secrets = {"SECRET_OF_TESTS": "s" * 40, "ADAPTER_CONTROL_TOKEN": f"file:{token}"}
    with embedded_adapter(*store, keys, COMPLETE, environ=secrets) as one:
        yield one


def ask(adapter: RunningAdapter, name: str, **headers: str) -> Reply:
    """Call the operation with nothing in its body, and hold the answer against the document."""
    operation = OPERATIONS[name]
    address = adapter.admin if operation.tag == "admin" else adapter.http
    with closing(Client(address)) as client:
        reply = client.request(operation.method, operation.path.format(**NAMES), {}, headers)
    answer = resolved(operation.about["responses"][str(reply.status)])
    for header, about in answer.get("headers", {}).items():
        assert header in reply.headers or not resolved(about).get("required"), header
    media_type = reply.headers["Content-Type"].partition(";")[0]
    import jsonschema  # here, as it costs each process of tests seconds

    schema = at_home(answer["content"][media_type]["schema"])
    jsonschema.Draft202012Validator(schema, registry=REGISTRY).validate(reply.json())
    return reply


@pytest.mark.parametrize("name", CONTROLLED)
def test_control_routes_without_token_are_401(guarded: RunningAdapter, name: str):
    assert ask(guarded, name).status == 401


def test_nothing_else_wants_the_control_token(guarded: RunningAdapter):
    for name in set(OPERATIONS) - set(CONTROLLED):
        operation = OPERATIONS[name]
        address = guarded.admin if operation.tag == "admin" else guarded.http
        with closing(Client(address)) as client:
            path = operation.path.format(**NAMES)
            assert client.request(operation.method, path, {}).status != 401, name


@pytest.mark.parametrize(
    "name", [name for name, each in OPERATIONS.items() if {"sigV4": []} in security(each)]
)
def test_unsigned_endpoint_call_is_403(guarded: RunningAdapter, name: str):
    reply = ask(guarded, name)

    assert (reply.status, reply.headers["x-amzn-ErrorType"]) == (403, "AccessDeniedException")


def test_without_a_store_the_endpoint_is_404(shared_adapter: RunningAdapter):
    assert ask(shared_adapter, "invokeEndpoint").status == 404


def test_a_drain_is_answered_as_described():
    with embedded_adapter(COMPLETE) as adapter:
        assert ask(adapter, "readyz").status == 200
        assert ask(adapter, "drain").status == 200
        assert ask(adapter, "readyz").status == 503
