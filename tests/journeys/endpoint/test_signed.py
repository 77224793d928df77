"""Calls of an endpoint that has keys: signed by boto3, and by nobody, and wrongly."""

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from tests.asking import binary_request
from tests.journeys.endpoint.conftest import client_of
from tests.journeys.endpoint.test_invoke import BODY, invoke, refusal
from tests.running import COMPLETE, EXAMPLES, Client, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

SECRETS = {"AKIDTEAMA": "the secret of team a", "AKIDALL": "wJalrXUtnFEMI/K7MDENG"}
TOKEN = "canary-7f3a9c0e51d24b86"  # noqa: S105 - it opens nothing else
TARGET = "X-Amzn-SageMaker-Target-Model"
PATH = "/endpoints/any/invocations"


@pytest.fixture(scope="module")
def signed(tmp_path_factory) -> Iterator[RunningAdapter]:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("team-a/one", "team-b/one"):
        shutil.copytree(EXAMPLES / "identity", folder / "store" / name)
    packed = folder / "store" / "shared" / "1"
    shutil.make_archive(str(packed), "gztar", EXAMPLES / "identity")
    file = folder / "secret"
    file.write_text(SECRETS["AKIDALL"] + "\n")
    config = folder / "adapter.yaml"
    keys = ["AKIDTEAMA env:SECRET_OF_A team-a/* shared/?.tar.gz", f"AKIDALL file:{file} *"]
    config.write_text(json.dumps({"endpoint_keys": keys}))
    environ = {"SECRET_OF_A": SECRETS["AKIDTEAMA"], "ADAPTER_CONTROL_TOKEN": TOKEN}
    store = (f"--model-store={folder}/store", f"--cache-dir={folder}/cache")
    with embedded_adapter(f"--config={config}", *store, COMPLETE, environ=environ) as running:
        yield running


def signing(adapter: RunningAdapter, key: str, secret: str | None = None) -> Any:
    keys = {"aws_access_key_id": key, "aws_secret_access_key": secret or SECRETS[key]}
    return closing(client_of(adapter.http, **keys))


@pytest.fixture(scope="module")
def team_a(signed) -> Iterator[Any]:
    with signing(signed, "AKIDTEAMA") as client:
        yield client


@pytest.fixture
def caller(signed) -> Iterator[Client]:
    with signed.client() as client:
        yield client


def code_of(error: ClientError) -> tuple[int, str]:
    found = error.response
    return found["ResponseMetadata"]["HTTPStatusCode"], found["Error"]["Code"]


@pytest.mark.parametrize("name", ["team-a/one", "shared/1.tar.gz"])
def test_a_signed_call_is_answered(team_a, name):
    assert json.loads(invoke(team_a, name)["Body"].read())["model_name"] == name


def test_a_session_token_has_no_meaning(signed):
    keys = {"aws_access_key_id": "AKIDTEAMA", "aws_secret_access_key": SECRETS["AKIDTEAMA"]}
    with closing(client_of(signed.http, **keys, aws_session_token="any")) as client:  # noqa: S106
        assert json.loads(invoke(client, "team-a/one")["Body"].read())["outputs"]


def test_a_large_body_is_signed_too(team_a):
    body, size = binary_request(2_000_000)
    kind = f"application/vnd.sagemaker-triton.binary+json;json-header-size={size}"
    answer = invoke(team_a, "team-a/one", Body=body, ContentType=kind)
    assert answer["Body"].read().endswith(body[size:])


def test_a_stream_is_signed_too(team_a):
    answer = team_a.invoke_endpoint_with_response_stream(
        EndpointName="any", InferenceComponentName="team-a/one", Body=json.dumps(BODY)
    )
    [part] = answer["Body"]
    assert json.loads(part["PayloadPart"]["Bytes"])["model_name"] == "team-a/one"


def test_forbidden_model_answers_as_absent_one(signed, team_a):
    def told(name: str) -> tuple[object, ...]:
        error = refusal(team_a, name)
        headers = error.response["ResponseMetadata"]["HTTPHeaders"]
        names = sorted(headers.keys() - {"date", "x-amzn-requestid"})
        text = error.response["Error"]["Message"].replace(name, "NAME")
        return (code_of(error), text, names, headers["x-triton-adapter-cache"])

    assert told("team-b/one") == told("team-a/none") == told("team-b/none")
    fetched = {line["key"] for line in signed.events("artifact.fetch_begun")}
    assert not [key for key in fetched if key.startswith("team-b")]
    with signing(signed, "AKIDALL") as everything:
        assert json.loads(invoke(everything, "team-b/one")["Body"].read())["outputs"]


@pytest.mark.parametrize("name", ["shared/10.tar.gz", "team-aa/one", "other/team-a/one"])
def test_patterns_are_of_the_whole_key(team_a, name):
    assert "Failed to download model data" in str(refusal(team_a, name))


@pytest.mark.parametrize("key", ["AKIDTEAMA", "AKIDNOBODY"])
def test_wrong_secret_and_unknown_key_look_alike(signed, key):
    with signing(signed, key, "wrong") as client:
        error = refusal(client, "team-a/one")
    assert code_of(error) == (403, "InvalidSignatureException")
    assert "does not match the signature you provided" in str(error)


def test_unsigned_call_is_refused_before_the_model(caller):
    for name in ("team-a/one", "none", "../.."):
        reply = caller.post(PATH, BODY, {TARGET: name})
        assert (reply.status, reply.headers["x-amzn-ErrorType"]) == (403, "AccessDeniedException")
        assert reply.headers["x-triton-adapter-cache"] == "miss"


@pytest.mark.parametrize(
    "changed",
    [
        {"Authorization": None},
        {"Authorization": ("AKIDTEAMA", "AKIDNOBODY")},
        {"X-Amz-Date": ("Z", "")},
        {"X-Amz-Date": ("20", "19")},
        {"X-Amz-Meta": "unsigned"},
    ],
)
def test_head_is_checked_before_the_body_is_read(signed, changed):
    """An unknown key is told by an earlier answer from a wrong secret. Keys are no secrets: each
    request shows its own, and AWS names an unknown one in words.
    """
    headers = {"Host": signed.http, **signed_headers(signed, bytes(1000))}
    for name, how in changed.items():
        old = headers.pop(name, "")
        if how is not None:
            headers[name] = how if isinstance(how, str) else old.replace(*how, 1)
    lines = [f"{name}: {value}" for name, value in headers.items() if name != "Content-Length"]
    head = "\r\n".join([f"POST {PATH} HTTP/1.1", *lines, "Content-Length: 1000", "\r\n"])
    host, _, port = signed.http.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as caller:
        caller.sendall(head.encode())
        assert caller.recv(2**16).startswith(b"HTTP/1.1 403 ")


def signed_headers(adapter: RunningAdapter, body: bytes, **more: str) -> dict[str, str]:
    given = {name.replace("_", "-"): value for name, value in more.items()}
    request = AWSRequest(
        "POST", f"http://{adapter.http}{PATH}", {TARGET: "team-a/one"} | given, body
    )
    credentials = Credentials("AKIDTEAMA", SECRETS["AKIDTEAMA"])
    SigV4Auth(credentials, "sagemaker", "eu-west-1").add_auth(request)
    return dict(request.headers.items())


def test_altered_call_is_refused(signed, caller):
    body = json.dumps(BODY).encode()
    headers = signed_headers(signed, body)
    assert caller.post(PATH, body, headers).status == 200
    altered = [
        (PATH, body.replace(b"1.5", b"2.5"), headers),
        (PATH.replace("any", "another"), body, headers),
        (PATH, body, headers | {TARGET: "team-a/two"}),
        (PATH, body, headers | {"X-Amzn-SageMaker-Target-Variant": "blue"}),
        (PATH + "?a=b", body, headers),
    ]
    for path, sent, given in altered:
        reply = caller.post(path, sent, given)
        assert (reply.status, reply.headers["x-amzn-ErrorType"]) == (
            *(403, "InvalidSignatureException"),
        )


@pytest.mark.parametrize("value", ["UNSIGNED-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"])
def test_bodies_that_are_not_signed_are_refused(signed, caller, value):
    body = json.dumps(BODY).encode()
    headers = signed_headers(signed, body, X_Amz_Content_SHA256=value)
    reply = caller.post(PATH, body, headers)
    assert (reply.status, reply.headers["x-amzn-ErrorType"]) == (403, "InvalidSignatureException")


def test_secrets_are_shown_nowhere(signed):
    with Client(signed.admin) as admin:
        shown = json.dumps(admin.get("/debug/config").json()) + json.dumps(signed.lines)
    assert "AKIDTEAMA env:SECRET_OF_A" in shown
    assert not any(secret in shown for secret in (*SECRETS.values(), TOKEN))
