"""Every refusal at an endpoint, the HTTP parser's too, has what AWS's clients look for."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.parsers import create_parser

from tests.asking import RawConnection
from tests.journeys.endpoint.conftest import client_of
from tests.journeys.endpoint.test_invoke import BODY, UUID, refusal
from tests.running import RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

LINE = b"POST /endpoints/any/invocations HTTP/1.1\r\nHost: localhost\r\n"
TARGET = b"X-Amzn-SageMaker-Target-Model: plain\r\n"
CHUNKED = TARGET + b"Transfer-Encoding: chunked\r\n\r\n"
INVALID, UNKNOWN = (400, "ValidationError"), (404, "UnknownOperationException")


def read_by_botocore(runtime: Any, status: int, headers: Mapping[str, str], body: bytes) -> Any:
    model = runtime.meta.service_model.operation_model("InvokeEndpoint")
    given = {"status_code": status, "headers": headers, "body": body}
    return create_parser("rest-json").parse(given, model.output_shape)


def parsed(head: bytes, body: bytes) -> tuple[int, dict[str, str], bytes]:
    line, *fields = head.decode().strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in fields)}
    return int(line.split()[1]), headers, body


def check(runtime: Any, status: int, headers: Mapping[str, str], body: bytes) -> str:
    """What each answer has; return the code that botocore reads in it."""
    assert UUID.fullmatch(headers["x-amzn-requestid"])
    assert headers["x-triton-adapter-cache"] in {"hit", "miss"}
    assert headers["x-amzn-errortype"]
    error = read_by_botocore(runtime, status, headers, body)["Error"]
    assert error["Message"]
    return str(error["Code"])


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"@" * 20, id="no HTTP"),
        pytest.param(LINE + b"No Header\r\n\r\n", id="bad header"),
        pytest.param(LINE + b"X: " + b"x" * 20_000 + b"\r\n\r\n", id="too long"),
        pytest.param(LINE + b"X: " + b"x" * 20_000, id="too long and no end"),
        pytest.param(LINE + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", id="two lengths"),
        pytest.param(LINE + b"Content-Length: -1\r\n\r\n", id="no length"),
        pytest.param(LINE + b"Transfer-Encoding: gzip\r\n\r\n", id="coding"),
        pytest.param(LINE.replace(b"1.1", b"3.0") + b"\r\n", id="version"),
        pytest.param(LINE + CHUNKED + b"x\r\n\r\n", id="no chunk"),
        pytest.param(LINE + CHUNKED + b"2\r\n{}x\r\n", id="chunk without its end"),
    ],
)
def test_what_is_no_http_is_a_validation_error(served, runtime, sent):
    with RawConnection(served.http) as connection:
        connection.send(sent)
        status, headers, body = parsed(*connection.read_whole())
    assert (status, check(runtime, status, headers, body)) == INVALID
    line = served.wait_for("request.failed", aws_request_id=headers["x-amzn-requestid"])
    assert line["status"] == 400


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 9\r\n\r\n{", CHUNKED[len(TARGET) :] + b"9\r\n{"]
)
def test_truncated_body_is_a_validation_error(served, runtime, framing):
    with RawConnection(served.http) as connection:
        connection.send(LINE + TARGET + framing)
        connection.end()
        status, headers, body = parsed(*connection.read_whole())
    assert (status, check(runtime, status, headers, body)) == INVALID


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/endpoints/%ff/invocations", INVALID),
        ("POST", "/endpoints//invocations", INVALID),
        ("POST", "/endpoints/a%2Fb/invocations", INVALID),
        ("POST", "/%65ndpoints/a_b/invocations", INVALID),
        ("POST", "http://localhost/endpoints/a_b/invocations?x=y", INVALID),
        ("POST", "/endpoints", UNKNOWN),
        ("POST", "/endpoints?x=y", UNKNOWN),
        ("POST", "/endpoints/", UNKNOWN),
        ("GET", "/endpoints", UNKNOWN),
        ("GET", "/endpoints/any", UNKNOWN),
        ("GET", "/endpoints/any/invocations", UNKNOWN),
        ("DELETE", "/endpoints/any/invocations", UNKNOWN),
        ("POST", "/endpoints/any/invocations/more", UNKNOWN),
        ("POST", "/endpoints/any/invocations-bidirectional-stream", UNKNOWN),
    ],
)
def test_unknown_path_has_an_error_code(caller, runtime, method, path, expected):
    reply = caller.request(method, path, BODY)
    headers = {name.lower(): value for name, value in reply.headers.items()}
    assert (reply.status, check(runtime, reply.status, headers, reply.body)) == expected


@pytest.fixture(scope="module")
def without_store() -> Iterator[RunningAdapter]:
    with embedded_adapter() as adapter:
        yield adapter


@pytest.mark.parametrize("operation", ["describe_endpoint", "delete_endpoint"])
def test_other_aws_operation_learns_what_is_here(served, operation):
    control = client_of(served.http, "sagemaker", config=None)
    with closing(control), pytest.raises(ClientError) as raised:
        getattr(control, operation)(EndpointName="any")
    error = raised.value.response["Error"]
    assert error["Code"] == "UnknownOperationException"
    name = operation.title().replace("_", "")
    assert error["Message"].startswith(f"there is nothing for 'SageMaker.{name}': ")
    assert "InvokeEndpoint (POST /endpoints/NAME/invocations)" in error["Message"]
    assert raised.value.response["ResponseMetadata"]["RetryAttempts"] == 0


def test_call_without_store_learns_which_settings_help(without_store):
    with closing(client_of(without_store.http)) as runtime:
        error = refusal(runtime).response["Error"]
    assert error["Code"] == "UnknownOperationException"
    assert re.search(r"no endpoint: set `model_store` or `endpoints`", error["Message"])


def test_invalid_http_without_store_is_answered_as_ever(without_store):
    with RawConnection(without_store.http) as connection:
        connection.send(b"@" * 20)
        _, headers, body = parsed(*connection.read_whole())
    assert json.loads(body).keys() == {"error", "code", "model_name"}
    assert not any(name.startswith("x-") for name in headers)
