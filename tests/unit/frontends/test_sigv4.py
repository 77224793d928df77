"""Signatures, with botocore's own signer as the judge of what is one."""

import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapter.frontends.endpoint.sigv4 import (
    SKEW_SECONDS,
    SignatureError,
    SignedRequest,
    check_body,
    is_signed_by,
    read_claim,
)
from tests.cases import rows

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"  # noqa: S105 - AWS's own example
PATH = "/endpoints/any/invocations"
TARGET = "X-Amzn-SageMaker-Target-Model"
_VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=60).filter(
    lambda value: value == value.strip()
)
_BLACKLISTED = ("User-Agent", "Expect")


def signed(
    body: bytes = b"{}",
    headers: dict[str, str] | None = None,
    *,
    path: str = PATH,
    secret: str = SECRET,
    token: str | None = None,
    region: str = "eu-west-1",
    service: str = "sagemaker",
) -> SignedRequest:
    given = {"Content-Type": "application/json"} | (headers or {})
    request = AWSRequest("POST", f"http://127.0.0.1:8080{path}", given, body)
    SigV4Auth(Credentials("AKID", secret, token), service, region).add_auth(request)
    lines = [("Host", "127.0.0.1:8080"), *request.headers.items()]
    return SignedRequest("POST", path, lines, hashlib.sha256(body).hexdigest())


def changed(request: SignedRequest, name: str, value: str | None) -> SignedRequest:
    """None takes the header away."""
    rest = [pair for pair in request.headers if pair[0].lower() != name.lower()]
    more = [] if value is None else [(name, value)]
    return SignedRequest(request.method, request.target, [*rest, *more], request.body_hash)


def is_valid(request: SignedRequest, secret: str = SECRET, now: datetime | None = None) -> bool:
    claim = read_claim(request, now or datetime.now(UTC))
    assert claim.access_key == "AKID"
    check_body(request)
    return is_signed_by(claim, secret, request)


@settings(deadline=None)
@given(
    st.binary(max_size=100),
    st.dictionaries(st.sampled_from([TARGET, "X-Amzn-SageMaker-Inference-Id", "Accept"]), _VALUES),
    st.sampled_from(["us-east-1", "eu-west-1", "local"]),
    st.sampled_from([None, "a/session+token=="]),
)
@example(b"", {TARGET: "a  b   c"}, "us-east-1", None)
def test_whatever_botocore_signs_is_valid(
    body: bytes, headers: dict[str, str], region: str, token: str | None
) -> None:
    assert is_valid(signed(body, headers, region=region, token=token))


@settings(deadline=None)
@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="?#/%.")))
def test_paths_are_read_as_they_are_sent(name: str) -> None:
    path = f"/endpoints/{name}%2Fa/invocations"
    assert is_valid(signed(path=path))


@settings(deadline=None)
@given(st.data())
def test_whatever_is_altered_is_not(data: st.DataObject) -> None:
    request = signed(b"{}", {TARGET: "model.tar.gz"})
    how = data.draw(st.sampled_from(["body", "path", "method", "host", "model", "secret", "type"]))
    other, secret = request, SECRET
    if how == "body":
        text = hashlib.sha256(data.draw(st.binary().filter(lambda b: b != b"{}"))).hexdigest()
        other = SignedRequest(request.method, request.target, request.headers, text)
    elif how == "path":
        other = SignedRequest(request.method, f"{PATH}-x", request.headers, request.body_hash)
    elif how == "method":
        other = SignedRequest("PUT", request.target, request.headers, request.body_hash)
    elif how == "secret":
        secret = data.draw(st.text().filter(lambda text: text != SECRET))
    else:
        name = {"host": "Host", "model": TARGET, "type": "Content-Type"}[how]
        other = changed(request, name, data.draw(_VALUES.map(lambda text: f"{text}x")))
    assert not is_valid(other, secret)


@pytest.mark.parametrize(("sign", "said"), [(1, "expired"), (-1, "not yet current")])
def test_a_clock_may_be_five_minutes_off(sign: int, said: str) -> None:
    request = signed()
    time = dict(request.headers)["X-Amz-Date"]
    at = datetime.strptime(time, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    assert is_valid(request, now=at + timedelta(seconds=sign * SKEW_SECONDS))
    with pytest.raises(SignatureError, match=said):
        is_valid(request, now=at + timedelta(seconds=sign * (SKEW_SECONDS + 1)))


def test_a_signature_of_yesterdays_key_is_refused() -> None:
    request = signed()
    day = dict(request.headers)["X-Amz-Date"][:8]
    text = dict(request.headers)["Authorization"].replace(f"/{day}/", "/20200101/")
    with pytest.raises(SignatureError, match="another day"):
        is_valid(changed(request, "Authorization", text))


@rows(
    ("name", "value", "said"),
    [
        ("Authorization", None, "authorization is there 0 times"),
        ("Authorization", "Bearer abc", "is not an AWS4-HMAC-SHA256 signature"),
        ("X-Amz-Date", None, "SignedHeaders must name headers of the request"),
        ("X-Amz-Date", "yesterday", "is not a time"),
        ("X-Amz-Date", "20261340T000000Z", "is not a time"),
        ("X-Amz-Content-SHA256", "UNSIGNED-PAYLOAD", "must be signed: x-amz-content-sha256"),
        ("X-Amzn-SageMaker-Target-Variant", "b", "must be signed: x-amzn-sagemaker-target-variant"),
        ("Content-Encoding", "gzip", "must be signed: content-encoding"),
    ],
)
def test_what_is_missing_or_not_signed_is_said(name: str, value: str | None, said: str) -> None:
    with pytest.raises(SignatureError, match=said):
        is_valid(changed(signed(), name, value))


@pytest.mark.parametrize(
    "value", ["UNSIGNED-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "0" * 64]
)
def test_signed_hash_must_be_that_of_body(value: str) -> None:
    with pytest.raises(SignatureError, match="must be the SHA-256 of the body"):
        is_valid(signed(headers={"X-Amz-Content-SHA256": value}))


def test_a_signature_of_another_service_is_refused() -> None:
    with pytest.raises(SignatureError, match="correct service: 'sagemaker'"):
        is_valid(signed(service="s3"))


def test_a_signature_in_the_query_is_refused() -> None:
    request = signed()
    query = f"{PATH}?X-Amz-Signature=abc"
    with pytest.raises(SignatureError, match="no query"):
        is_valid(SignedRequest("POST", query, request.headers, request.body_hash))


@pytest.mark.parametrize("name", [TARGET, "Host", "X-Amz-Date", "Authorization", "Content-Type"])
def test_header_that_counts_must_not_be_there_twice(name: str) -> None:
    request = signed(headers={TARGET: "model"})
    twice = [*request.headers, (name, "another")]
    with pytest.raises(SignatureError, match="is there 2 times"):
        is_valid(SignedRequest("POST", PATH, twice, request.body_hash))
