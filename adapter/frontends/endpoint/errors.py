"""Answers of the endpoint as boto3 reads them: error bodies, and headers of each answer."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import getrandbits

from adapter.core.artifacts import CacheUse
from adapter.core.calls import NOT_STARTED
from adapter.core.model import ModelId
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    NoRoom,
    TooManyWaiting,
    UnknownOperation,
    was_not_started,
)
from adapter.frontends.http.instrumentation import Refusal, own_refusal, quoted
from adapter.frontends.status import MODEL_ERROR, aws_status

# The SDKs give this name to the only variant of an endpoint.
VARIANT = "AllTraffic"
CACHE = "X-Triton-Adapter-Cache"
VARIANT_HEADER = "x-Amzn-Invoked-Production-Variant"
REQUEST_ID = "x-amzn-RequestId"
_MAX_MESSAGE = 2048
_CLIENT = 400
_SERVER = 500
# AWS says that a container gave no answer in time by a status that there is not.
_NO_STATUS = 0
_BUSY = 503
_OURS = 500
_RETRY_MS = 1000
# There is no account here; the ARN has the form that clients expect.
ACCOUNT = "000000000000"
_REGION = "us-east-1"
_SCOPE = re.compile(r"Credential=[^/,]+/[0-9]{8}/([a-z0-9-]{1,32})/sagemaker/")


_RANDOM = f"{getrandbits(80):020x}"
_FIRST = f"{_RANDOM[:8]}-{_RANDOM[8:12]}-4{_RANDOM[12:15]}-a{_RANDOM[15:18]}-"
_NUMBERS = count(getrandbits(44))
_LINE = f"{REQUEST_ID}: {_FIRST}%012x\r\n".encode()


def new_request_id() -> str:
    """Return one in the form of AWS's. They are random for the process and counted on: one with
    random digits throughout costs 2 us, and they are no secrets.
    """
    return f"{_FIRST}{next(_NUMBERS):012x}"


def new_request_id_line() -> bytes:
    """Return the header line of an answer with a new one."""
    return _LINE % next(_NUMBERS)


@dataclass(slots=True)
class CallInfo:
    """Describes one call for its answer and its error."""

    request_id: str
    endpoint: str = ""
    variant: str = VARIANT
    authorization: Callable[[], str] = str  # returns the header of this name
    cache: CacheUse = CacheUse.MISS  # until a model was found
    was_sent: bool = False  # Triton had the request before, and ran out of memory
    model_id: ModelId | None = None

    def headers(self) -> dict[str, str]:
        """Return the headers of the answer that say how the call was served."""
        return {
            REQUEST_ID: self.request_id,
            VARIANT_HEADER: self.variant,
            CACHE: self.cache.value,
        }


def _region_of(authorization: str) -> str:
    """Return the region that a caller has signed for."""
    match = _SCOPE.search(authorization)
    return match[1] if match else _REGION


def refusal_of(error: AdapterError | None, call_info: CallInfo) -> Refusal:
    """Return the answer for an error. Of a bug, which None stands for, and of what is wrong with
    this machine the log has more.
    """
    status, code = (_OURS, "") if error is None else aws_status(error)
    if error is None or status == _OURS:
        body = _write_message("internal error; see the log")
        return _make_refusal(500, "InternalFailure", body, {}, call_info)
    headers = {}
    if status == _BUSY:
        wait = error.retry_after_ms if isinstance(error, NoRoom | TooManyWaiting) else _RETRY_MS
        headers["x-amz-retry-after"] = str(wait)
        if was_not_started(error) and not call_info.was_sent:
            headers[NOT_STARTED] = "1"
    if (status, code) == MODEL_ERROR:
        body = json.dumps(_describe_model_error(error, call_info))
    elif isinstance(error, UnknownOperation):  # where clients of AWS's other services look for it
        body = json.dumps({"Message": str(error), "__type": code})
    else:
        body = _write_message(str(error))
    return _make_refusal(status, code, body, headers, call_info)


def message_of(error: AdapterError, call_info: CallInfo) -> str:
    """Return what a caller is told of an error of a stream that has begun."""
    return str(json.loads(refusal_of(error, call_info).body)["Message"])


def _write_message(text: str) -> str:
    """Return the body of an error of AWS."""
    return f'{{"Message": {quoted(text)}}}'


def _make_refusal(
    status: int, code: str, body: str, headers: dict[str, str], call_info: CallInfo
) -> Refusal:
    """Return the answer to a refused call, with the code of its error in AWS's words."""
    logged = {"status": status, "aws_request_id": call_info.request_id}
    return Refusal(status, {"x-amzn-ErrorType": code, **headers}, body, logged)


def _describe_model_error(error: AdapterError, call_info: CallInfo) -> dict[str, object]:
    """Return the body of AWS's ModelError: callers find the status and the model's own words by the
    form of its sentence.
    """
    own = own_refusal(error, call_info.model_id)
    status = own.status
    message = own.body
    if isinstance(error, BackendTimeout):
        status = _NO_STATUS
        message = (
            "Your invocation timed out while waiting for a response from container primary. "
            f"{error}"
        )
    is_client = _CLIENT <= status < _SERVER
    before = f"Received {'client' if is_client else 'server'} error ({status}) from primary"
    text = f'{before} with message "'
    end = f'". See the log of triton-adapter, request {call_info.request_id}, for more information.'
    group = f"log-group:/aws/sagemaker/Endpoints/{call_info.endpoint}"
    return {
        "ErrorCode": "CLIENT_ERROR_FROM_MODEL" if is_client else "INTERNAL_FAILURE_FROM_MODEL",
        "LogStreamArn": f"arn:aws:logs:{_region_of(call_info.authorization())}:{ACCOUNT}:{group}",
        "Message": text + message[: _MAX_MESSAGE - len(text) - len(end)] + end,
        "OriginalMessage": message[:_MAX_MESSAGE],
        "OriginalStatusCode": status,
    }
