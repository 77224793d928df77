"""Extracts callers' request ids from headers, as fields of the log. Never used as keys."""

import re
from collections.abc import Mapping

from adapter.core.calls import RpcMetadata

# W3C Trace Context: version, trace, parent, flags
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")

_MAX_CHARACTERS = 1024  # SageMaker's limit of its longest field

_FIELDS = {
    "x-amzn-sagemaker-target-model": "target_model",
    "x-amzn-sagemaker-inference-id": "inference_id",
    "x-amzn-sagemaker-custom-attributes": "custom_attributes",
    "x-request-id": "request_id",
}


def of_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the log fields. Names in `headers` are compared without case."""
    present = {field: name for name, field in _FIELDS.items() if name in headers}
    found = {field: headers[name][:_MAX_CHARACTERS] for field, name in present.items()}
    if (trace := _TRACEPARENT.fullmatch(headers.get("traceparent", ""))) is not None:
        found["trace_id"] = trace[1]
    return found


def of_metadata(metadata: RpcMetadata) -> dict[str, str]:
    return of_headers({key: value for key, value in metadata if isinstance(value, str)})
