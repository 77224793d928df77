"""Words errors as OpenAI's clients read them."""

import json
from math import ceil

from adapter.core.model import ModelId
from adapter.errors import (
    AdapterError,
    ArtifactNotFound,
    ModelNotFound,
    Overloaded,
    TooManyWaiting,
)
from adapter.frontends.http.instrumentation import Refusal, own_refusal
from adapter.frontends.status import MODEL_ERROR, aws_status

_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500


def refusal_of(error: AdapterError | None, model_id: ModelId | None) -> Refusal:
    """Return the answer for an error in OpenAI's form; None stands for a bug.

    Where callers are too many the status is 429. With that and 503 it says when to try again:
    OpenAI's clients wait so long. They send a call again after any 5xx, unless told not to: as at
    the endpoint, what the model may be guilty of is not worth a second try.
    """
    own = own_refusal(error, model_id)
    reported = json.loads(own.body)
    status = own.status
    headers = dict(own.headers)
    if isinstance(error, TooManyWaiting | Overloaded):
        status = _TOO_MANY_REQUESTS
    if isinstance(error, ModelNotFound | ArtifactNotFound):
        reported["code"] = "model_not_found"
    if isinstance(error, ModelNotFound):
        # the store was not asked: the page names the setting that has calls load models
        reported["error"] += "; see docs/openai.md"
    if error is not None and aws_status(error) == MODEL_ERROR:
        headers["X-Should-Retry"] = "false"
    elif status in (_TOO_MANY_REQUESTS, 503):
        headers["Retry-After"] = str(ceil(getattr(error, "retry_after_ms", 1000) / 1000))
    body = {
        "message": reported["error"],
        "type": "server_error" if status >= _SERVER_ERROR else "invalid_request_error",
        "param": None,
        "code": reported["code"],
    }
    return Refusal(status, headers, json.dumps({"error": body}), {"status": status})
