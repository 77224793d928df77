"""Which calls of the endpoint are plain."""

from typing import Any

from adapter.frontends.http.endpoint.call import EndpointCall, EndpointCalls
from adapter.frontends.http.endpoint.members import Endpoints
from tests.cases import rows


def call(target: bytes = b"/endpoints/any/invocations", **headers: bytes) -> EndpointCall | None:
    fields = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    nowhere: Any = None
    return EndpointCalls(Endpoints(["named"], takes_all=True), nowhere).read(target, fields)


def test_a_model_is_known_to_triton_by_a_safe_name() -> None:
    found = call(x_amzn_sagemaker_target_model=b"team-a/m.tar.gz")
    assert (found.model_id, found.name, found.renames) == (
        *("team-a/m.tar.gz", "ta.u.team-a_2fm_2etar_2egz", True),
    )
    assert not call(x_amzn_sagemaker_target_model=b"m.tar.gz").renames


def test_a_named_endpoint_has_models_of_its_own() -> None:
    found = call(b"/endpoints/named/invocations", x_amzn_sagemaker_target_model=b"m")
    assert found.model_id == "named/m"


@rows(
    ("target", "headers"),
    [
        (b"/endpoints/any/invocations-response-stream", {}),
        (b"/endpoints/any/invocations?a=b", {}),
        (b"/endpoints/a%20b/invocations", {}),
        (b"/endpoints/-a/invocations", {}),
        (b"/endpoints/any/invocations", {"x_amzn_sagemaker_target_model": b""}),
        (b"/endpoints/any/invocations", {"x_amzn_sagemaker_target_model": b"../a"}),
        (b"/endpoints/any/invocations", {"x_amzn_sagemaker_session_id": b"NEW_SESSION"}),
        (b"/endpoints/any/invocations", {"accept": b"\xff"}),
    ],
)
def test_what_needs_a_word_is_not_plain(target: bytes, headers: dict[str, bytes]) -> None:
    assert call(target, **{"x_amzn_sagemaker_target_model": b"m", **headers}) is None
