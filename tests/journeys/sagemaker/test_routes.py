"""Routes and methods: what there is, and what everything else is answered."""

import pytest

from tests.asking import JSON, RawConnection, refusal
from tests.cases import rows
from tests.running import Client, RunningAdapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton

_ALLOWED = {
    "/ping": "GET, HEAD",
    "/models": "GET, HEAD, POST",
    "/models/echo": "GET, HEAD, DELETE",
    "/models/nobody": "GET, HEAD, DELETE",
    "/models/echo/invoke": "POST",
    "/invocations": "POST",
}
_NAMED = {f"/models/{name}{end}": name for name in ("echo", "nobody") for end in ("", "/invoke")}
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@rows(
    ("path", "method"),
    [(path, m) for path, allowed in _ALLOWED.items() for m in _METHODS if m not in allowed],
)
def test_a_wrong_method_is_405_with_what_is_allowed(caller: Client, path: str, method: str) -> None:
    reply = caller.request(method, path)

    assert refusal(reply) == (405, "MethodNotAllowed", _NAMED.get(path))
    assert reply.headers["Allow"] == _ALLOWED[path]


def test_what_is_refused_is_logged_with_the_model_that_the_path_names(
    served: RunningAdapter, caller: Client
) -> None:
    for method, path, error in (
        ("PUT", "/models/a-wrong-method", "MethodNotAllowed"),
        ("GET", "/models/an-inference/invoke", "MethodNotAllowed"),
        ("GET", "/models/not-there", "ModelNotFound"),
        ("POST", "/models/not-invoked/invoke", "ModelNotFound"),
        ("GET", "/v2/models/not-in-v2", "ModelNotFound"),
        ("POST", "/v2/models/not-inferred/infer", "ModelNotFound"),
    ):
        name = path.removeprefix("/v2").split("/")[2]

        def refused(method: str = method, path: str = path) -> None:
            assert caller.request(method, path).status in {404, 405}

        line = served.line_of(refused, "request.failed", model_id=name)
        assert (line["error"], line["level"], line["path"]) == (error, "info", path)
    line = served.line_of(lambda: caller.request("DELETE", "/ping"), "request.failed", path="/ping")
    assert (line["status"], "model_id" in line) == (405, False)


@rows("path", ["/nothing", "/pings", "/models/echo/other", "/models/echo/invoke/more", "//models"])
@rows("method", ["GET", "POST", "DELETE"])
def test_an_unknown_route_is_refused(caller: Client, path: str, method: str) -> None:
    assert refusal(caller.request(method, path)) == (400, "InvalidRequest", None)


def test_an_empty_model_name_in_the_path_is_refused(caller: Client) -> None:
    assert refusal(caller.get("/models//invoke"))[:2] == (400, "InvalidRequest")
    assert refusal(caller.get("/models//"))[:2] == (400, "InvalidRequest")


@rows("path", ["/ping", "/models", "/models/echo"])
def test_head_is_get_without_the_body(caller: Client, path: str) -> None:
    got, head = caller.get(path), caller.request("HEAD", path)

    assert (head.status, head.body) == (got.status, b"")
    assert head.headers["Content-Type"] == got.headers["Content-Type"]


def test_head_of_a_model_that_is_not_loaded_is_404(caller: Client) -> None:
    assert caller.request("HEAD", "/models/nobody").status == 404


def test_head_of_what_cannot_be_got_is_405(caller: Client) -> None:
    reply = caller.request("HEAD", "/models/echo/invoke")

    assert (reply.status, reply.headers["Allow"]) == (405, "POST")


def test_one_trailing_slash_means_nothing(caller: Client) -> None:
    assert caller.get("/ping/").status == 200
    assert caller.get("/models/").json() == caller.get("/models").json()
    assert caller.get("/models/echo/").json()["modelName"] == "echo"
    assert caller.post("/models/echo/invoke/", infer_body(1.0)).status == 200


def test_a_query_that_nobody_asked_for_means_nothing(caller: Client) -> None:
    assert caller.get("/models/echo?a=b&c=/x").json()["modelName"] == "echo"
    assert caller.post("/models/echo/invoke?a=b", infer_body(1.0)).status == 200


def test_an_absolute_request_target_is_its_path(served: RunningAdapter) -> None:
    with RawConnection(served.http) as connection:
        connection.send(b"GET http://any.host/models/echo HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, body = connection.read_answer()

    assert (status, b'"echo"' in body) == (200, True)


def test_answers_to_control_calls_are_json(caller: Client) -> None:
    for path in ("/models", "/models/echo"):
        assert caller.get(path).headers["Content-Type"] == JSON
    assert caller.get("/ping").body == b""


def test_invocations_needs_single_model_mode(caller: Client) -> None:
    reply = caller.post("/invocations", infer_body(1.0))

    assert refusal(reply) == (400, "InvalidRequest", None)
    assert "single-model" in reply.json()["error"]


@rows("path", ["/models/nobody", "/models/nobody/"])
@rows("method", ["GET", "DELETE"])
def test_a_model_that_is_not_loaded_is_404(caller: Client, method: str, path: str) -> None:
    assert refusal(caller.request(method, path)) == (404, "ModelNotFound", "nobody")


def test_invoking_a_model_that_is_not_loaded_is_404(caller: Client) -> None:
    reply = caller.post("/models/nobody/invoke", infer_body(1.0))

    assert refusal(reply) == (404, "ModelNotFound", "nobody")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_names_the_product_its_version_and_the_documentation(
    caller: Client, method: str
) -> None:
    reply = caller.request(method, "/")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "application/json")
    if method == "GET":
        assert reply.json().keys() == {"product", "version", "documentation", "openapi"}
        assert reply.json()["product"] == "triton-adapter"
        assert caller.get(reply.json()["openapi"]).status == 200
    assert caller.post("/").status == 405
