"""Routes and methods of SageMaker's contract and of V2, and what everything else is answered."""

import pytest

from tests.asking import JSON, RawConnection, refusal
from tests.cases import rows
from tests.trees import infer_body

pytestmark = pytest.mark.triton


NOWHERE = [
    *("/nothing", "/pings", "/models//", "/models//invoke", "/models/echo/other"),
    *("/models/echo/invoke/more", "//models", "/v2/nothing", "/v2/models", "/v2/health"),
    *("/v2/models/echo/other", "/v2/models/echo/versions", "/v2/models/echo/versions/x"),
    *("/v2/models//infer", "/v2/models/%FF", "/v2/models/echo/versions/1/trace/setting"),
    *("/v2/logging/x", "/v2/repository", "/v2/repository/models/m"),
]


@rows("path", NOWHERE)
@rows("method", ["GET", "POST", "DELETE"])
def test_an_unknown_route_is_refused(caller, path, method):
    assert refusal(caller.request(method, path)) == (400, "InvalidRequest", None)


NOT_LOADED = [
    ("GET", "/models/no%2Fbody"),
    ("DELETE", "/models/no%2Fbody"),
    ("DELETE", "/models/no%2Fbody/"),
    ("POST", "/models/no%2Fbody/invoke"),
    ("GET", "/v2/models/no%2Fbody"),
    ("GET", "/v2/models/no%2Fbody/ready"),
    ("GET", "/v2/models/no%2Fbody/config"),
    ("GET", "/v2/models/no%2Fbody/versions/1/stats"),
    ("POST", "/v2/models/no%2Fbody/infer"),
    ("POST", "/v2/models/no%2Fbody/versions/1/generate"),
    ("POST", "/v2/models/no%2Fbody/generate_stream"),
]


@rows(("method", "path"), NOT_LOADED)
def test_a_model_that_is_not_loaded_is_404(caller, method, path):
    reply = caller.request(method, path, {} if method == "POST" else None)
    assert refusal(reply) == (404, "ModelNotFound", "no/body")


@rows("path", ["/ping", "/models", "/models/echo", "/models/nobody"])
def test_head_is_get_without_the_body(caller, path):
    got, head = caller.get(path), caller.request("HEAD", path)
    assert (head.status, head.body) == (got.status, b"")
    assert head.headers["Content-Type"] == got.headers["Content-Type"]
    assert got.headers["Content-Type"] == (None if path == "/ping" else JSON)


def test_head_of_what_cannot_be_got_is_405(caller):
    reply = caller.request("HEAD", "/models/echo/invoke")
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")


def test_one_trailing_slash_means_nothing(caller):
    assert caller.get("/ping/").status == 200
    assert caller.get("/models/").json() == caller.get("/models").json()
    assert caller.get("/models/echo/").json()["modelName"] == "echo"
    assert caller.post("/models/echo/invoke/", infer_body(1.0)).status == 200


def test_a_query_that_nobody_asked_for_means_nothing(caller):
    assert caller.get("/models/echo?a=b&c=/x").json()["modelName"] == "echo"
    assert caller.post("/models/echo/invoke?a=b", infer_body(1.0)).status == 200


def test_an_absolute_request_target_is_its_path(served):
    with RawConnection(served.http) as connection:
        connection.send(b"GET http://any.host/models/echo HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, body = connection.read_answer()
    assert (status, b'"echo"' in body) == (200, True)


def test_invocations_needs_single_model_mode(caller):
    reply = caller.post("/invocations", infer_body(1.0))
    assert refusal(reply) == (400, "InvalidRequest", None)
    assert "single-model" in reply.error


def test_the_root_names_the_product_and_its_documentation(caller):
    reply = caller.get("/")
    assert reply.status == caller.request("HEAD", "/").status == 200
    assert reply.json().keys() == {"product", "version", "documentation", "openapi"}
    assert reply.json()["product"] == "triton-adapter"
    assert caller.get(reply.json()["openapi"]).status == 200
    assert caller.post("/").status == 405
