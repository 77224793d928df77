"""Errors in OpenAI's form: status, Retry-After and code."""

import json

from adapter.core.model import ModelId
from adapter.errors import (
    AdapterError,
    ArtifactNotFound,
    BackendTimeout,
    BackendUnavailable,
    GivenUp,
    InferenceFailed,
    ModelNotFound,
    ModelNotReady,
    NoRoom,
    OutOfMemory,
    Overloaded,
    PayloadTooLarge,
    StubDied,
    TooManyWaiting,
    UnloadedMeanwhile,
)
from adapter.frontends.openai.errors import refusal_of
from tests.cases import rows


@rows(
    ("error", "status", "code", "retry_after"),
    [
        (ModelNotFound("no"), 404, "model_not_found", None),
        (ArtifactNotFound("no"), 404, "model_not_found", None),
        (TooManyWaiting("busy", retry_after_ms=2500), 429, "TooManyWaiting", "3"),
        (Overloaded("full", delivered=True), 429, "BackendUnavailable", "1"),
        (NoRoom("full", retry_after_ms=60_000), 503, "NoRoom", "60"),
        (ModelNotReady("soon"), 503, "ModelNotReady", "1"),
        (BackendUnavailable("away", delivered=False), 503, "BackendUnavailable", "1"),
        (PayloadTooLarge("large"), 413, "PayloadTooLarge", None),
        (InferenceFailed("raised"), 500, "InferenceFailed", None),
        (None, 500, "InternalError", None),
    ],
)
def test_error_says_status_code_and_time(
    error: AdapterError | None, status: int, code: str, retry_after: str | None
) -> None:
    refusal = refusal_of(error, ModelId("m"))
    body = json.loads(refusal.body)["error"]
    assert (refusal.status, body["code"], body["param"]) == (status, code, None)
    assert refusal.headers.get("Retry-After") == retry_after
    assert body["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert refusal.logged["status"] == status


@rows(
    "error",
    [
        InferenceFailed("raised"),
        StubDied("died"),
        OutOfMemory("out of memory"),
        BackendTimeout("hangs"),
        GivenUp("ended Triton often"),
        BackendUnavailable("Triton has ended", delivered=True),
    ],
)
def test_what_may_fail_again_is_not_retried(error: AdapterError) -> None:
    """The endpoint answers ModelError for the same reason."""
    headers = refusal_of(error, ModelId("m")).headers
    assert (headers.get("X-Should-Retry"), headers.get("Retry-After")) == ("false", None)


@rows(
    "error",
    [
        None,
        ModelNotReady("soon"),
        NoRoom("full"),
        Overloaded("full", delivered=True),
        UnloadedMeanwhile("unloaded"),
        BackendUnavailable("away", delivered=False),
    ],
)
def test_what_may_succeed_later_is_retried(error: AdapterError | None) -> None:
    assert "X-Should-Retry" not in refusal_of(error, ModelId("m")).headers
