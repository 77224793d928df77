"""Turns what Triton said into one of our errors. Whether a text is about memory is read by
oom.py and evidence.py.

Triton has no code for out of memory: load failures of every kind are INVALID_ARGUMENT, and failed
inferences whatever the backend chose (docs/design/triton.md, Failures). So the status is looked at
first and the text second.
"""

import re

from adapter.core.model import ModelId, TritonName, show_own_names
from adapter.core.oom import Classifier, Phase, Strength, Verdict
from adapter.errors import (
    AdapterError,
    AlreadyRegistered,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    InvalidRequest,
    LoadFailed,
    MemoryFigures,
    ModelNotFound,
    NotJson,
    NotRegistered,
    OutOfMemory,
    Overloaded,
    PayloadTooLarge,
    StubDied,
)

# grpcio's own words when there was no Triton to say anything
_NOT_DELIVERED = re.compile(
    r"failed to connect|connection refused|name resolution|DNS", re.IGNORECASE
)
_LOST = re.compile(
    r"socket closed|connection reset|goaway|stream removed|transport|recvmsg|broken pipe|"
    r"connection (?:closed|aborted|timed out)|keepalive|ping timeout|too many pings|"
    r"endpoint closing|channel (?:is )?closed",
    re.IGNORECASE,
)
# Triton's own words end the text: what stands before them (a request id) a caller may have chosen.
# UNAVAILABLE instead of NOT_FOUND before mid-2022.
_UNKNOWN_MODEL = re.compile(
    r"(?:Request for unknown model: '[^']*' (?:is not found|has no available versions)"
    r"|'[^']*' version \d+ is not at ready state)\.?\s*$"
)
# Triton knows the model and never had this version of it; a version that it had and unloaded is
# `not at ready state`, and of a model that it does not know no version is mentioned.
_UNKNOWN_VERSION = re.compile(r"Request for unknown model: '[^']*' version \d+ is not found\.?\s*$")
# What went through Triton: here a model or a caller may have chosen the words.
_TRITONS = re.compile(
    r"\[request id: |in ensemble '|Failed to process the request\(s\) for model '"
)
# grpcio on a message that one side will not send or the other not take. `CLIENT: Received` and
# `SERVER: Sent` are about the answer; older versions name no side, and the request is meant then.
_METADATA_TOO_LARGE = re.compile(
    r"received (?:metadata size exceeds (?:soft|hard)|initial metadata size exceeds) limit"
)
_REQUEST_TOO_LARGE = re.compile(
    r"^(?!CLIENT: Received|SERVER: Sent).{0,40}message larger than max", re.IGNORECASE
)
# Triton's own limit on what comes over HTTP, since 2.59
_BODY_TOO_LARGE = re.compile(
    r"exceeds the maximum allowed (?:input size|value) ?of \d+(?: bytes)?\."
    r" Use --http-max-input-size to increase the limit\.\s*$"
)
# A region of shared memory that an inference or a registration names, and that is not there.
_NO_REGION = re.compile(r"Unable to (?:find|open) shared memory region: '[^']*'\.?\s*$")
# A log setting that Triton does not take; it calls that UNAVAILABLE.
_NO_SETTING = re.compile(r"invalid argument for --log_format, got: ")
_NOT_JSON = "failed to parse the request JSON buffer"
_DEAD_STUB = re.compile(
    r"^(?:\[request id: (?s:.*)\] )?(?:in ensemble '[^']*', )?"
    r"Stub process '[^']*' is not healthy\.?\s*$"
)

_DECOUPLED = re.compile(r"doesn't support models with decoupled transaction policy\.?\s*$")
_STREAMS = (
    "; it takes generate_stream, over gRPC ModelStreamInfer, at the endpoint"
    " InvokeEndpointWithResponseStream"
)

# What Triton says to every load and unload in the modes `none`, its default, and `poll`.
_NOT_EXPLICIT = "explicit model load / unload is not allowed"
NOT_EXPLICIT = (
    "Triton does not load or unload models by call: start Triton with"
    " --model-control-mode=explicit; see docs/triton.md#external-triton-is-another-process"
)

ENVIRONMENTS = "docs/packages.md#python-environments"
# The package may be fine: Triton's own installation lacks what runs it.
_NO_BACKEND = re.compile(
    r"unable to find backend library for backend|triton_python_backend_stub is not found"
)
# The process of a python model is gone before the load is done.
_DEAD_IN_LOAD = re.compile(r": Internal: Stub process '[^']*' is not healthy")
_NO_MODULE = re.compile(r"\bModuleNotFoundError: No module named '[^']*'")

# gRPC code of a load failure -> what Triton's HTTP port would have said
_HTTP_OF_LOAD = {"INVALID_ARGUMENT": 400, "NOT_FOUND": 404, "INTERNAL": 500, "UNKNOWN": 400}
# the same for an inference. UNKNOWN, which shares 400 over HTTP, is never Triton's check of inputs
_HTTP_OF_INFER = {
    "INVALID_ARGUMENT": 400,
    "ALREADY_EXISTS": 400,
    "NOT_FOUND": 404,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}

# Codes of a model's own that its caller gets as they are, and the error that each becomes.
# NOT_FOUND is none of them: it makes a platform load the model again.
_OWN_CODES = {
    "UNKNOWN": InferenceFailed,
    "CANCELLED": InferenceFailed,
    "UNIMPLEMENTED": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "UNAVAILABLE": Overloaded,
}
# Triton says UNAVAILABLE too, when a queue is full or a request was in it for too long.
_TURNED_AWAY = re.compile(r"(?:Exceeds maximum queue size|[Tt]imeout expired)\.?\s*$")

# of calls about no model
_OF_REGISTRATION = {"NOT_FOUND": NotRegistered, "ALREADY_EXISTS": AlreadyRegistered}

_NOT_FOUND = 404
_SERVER_ERROR = 500
_NOT_IMPLEMENTED = 501
_UNAVAILABLE = 503


class Faults:
    """Words what Triton said for callers.

    A text has `model_id` instead of Triton's name for it, where the two differ, and the own name of
    a part of the package. Of a path in `repository`, Triton's, it has what lies below it.
    """

    def __init__(self, classifier: Classifier, repository: str = "") -> None:
        self._classifier = classifier
        # a path that has the repository's in its middle is another one, and stays whole
        folder = re.escape(repository.rstrip("/"))
        self._repository = re.compile(rf"(?<![\w.-]){folder}/") if repository else None

    def _word_for_caller(self, text: str, name: TritonName | None, model_id: ModelId | None) -> str:
        text = text.strip().removesuffix(";").strip()
        if not text:
            return "the model gave no reason" if model_id else "Triton gave no reason"
        if self._repository is not None:
            text = self._repository.sub("", text)
        text = show_own_names(text)
        if not name or model_id is None or str(name) == str(model_id):
            return text
        # as a whole word, as a model may be named "m" and Triton's texts say "model"; an instance
        # of the model has its number behind the name: m_0_1
        word = rf"(?<![\w.-]){re.escape(name)}(?=_\d|[^\w-]|$)"
        return re.sub(word, lambda _: str(model_id), text)

    def explain_control(
        self, code: str, text: str, *, name: TritonName | None = None, model_id: ModelId | None
    ) -> AdapterError:
        """Return the error for a load, unload or index call that failed with this gRPC code."""
        caller_text = self._word_for_caller(text, name, model_id)
        error = _explain_transport(code, text, caller_text, model_id)
        if error is not None:
            return error
        if code == "RESOURCE_EXHAUSTED":
            # grpcio's own limits on messages and metadata; Triton never uses this code
            return LoadFailed(caller_text, model_id=model_id)
        if is_not_explicit(text):
            return BackendError(NOT_EXPLICIT, model_id=model_id)
        verdict = self._classifier.judge(
            text, phase=Phase.LOAD, http_status=_HTTP_OF_LOAD.get(code, _SERVER_ERROR)
        )
        if verdict.strength is Strength.STRONG:
            return _make_out_of_memory(caller_text, verdict, model_id)
        suspected = verdict.matched
        of_shm = verdict.of_shm
        caller_text = _add_environment_advice(caller_text)
        caller_text = _add_backend_advice(caller_text)
        caller_text = _add_crash_advice(caller_text)
        return LoadFailed(caller_text, model_id=model_id, suspected=suspected, of_shm=of_shm)

    def explain_inference(
        self, status: int, content_type: str, text: str, *, name: TritonName, model_id: ModelId
    ) -> AdapterError:
        """Return the error for an inference over HTTP that was answered with a status from 400 on.

        Triton's HTTP port says 500 to many faults of the caller. They were found while the
        request was parsed, and only those come as JSON by content type; failures of the execution
        are text/plain. Without `name` the call was about no model.
        """
        if status == _NOT_FOUND and not name:
            return NotRegistered(self._word_for_caller(text, None, None))
        if _BODY_TOO_LARGE.search(text):
            return PayloadTooLarge(self._word_for_caller(text, name, model_id), model_id=model_id)
        if status == _SERVER_ERROR and content_type.startswith("application/json"):
            kind = NotJson if text.startswith(_NOT_JSON) else InvalidRequest
            return kind(self._word_for_caller(text, name, model_id), model_id=model_id)
        return self._explain_answer(status, text, name, model_id)

    def explain_server_call(self, code: str, text: str) -> AdapterError:
        """Return the error for a call about no model that failed with this gRPC code."""
        if (kind := _OF_REGISTRATION.get(code)) is not None:
            return kind(self._word_for_caller(text, None, None))
        return self.explain_grpc_inference(code, text, name=TritonName(""), model_id=ModelId(""))

    def explain_grpc_inference(
        self,
        code: str,
        text: str,
        *,
        name: TritonName,
        model_id: ModelId,
        is_tritons: bool = False,  # Triton has sent it, so no text can mean that Triton is away
    ) -> AdapterError:
        """Return the error for an inference, or another call about one model, that failed with this
        gRPC code.

        RESOURCE_EXHAUSTED is grpcio's: a message or the metadata was too large. Triton itself
        never uses it, so it is no lack of memory.
        """
        caller_text = self._word_for_caller(text, name, model_id)
        error = _explain_transport(code, text, caller_text, model_id, is_tritons=is_tritons)
        if error is not None:
            return error
        if code == "RESOURCE_EXHAUSTED":
            if _METADATA_TOO_LARGE.match(text):
                reason = f"the request's metadata are more than Triton takes: {caller_text}"
                return InvalidRequest(reason, model_id=model_id)
            if _REQUEST_TOO_LARGE.search(text):
                return PayloadTooLarge(caller_text, model_id=model_id)
            return InferenceFailed(caller_text, model_id=model_id)
        error = self._explain_answer(_HTTP_OF_INFER.get(code, _SERVER_ERROR), text, name, model_id)
        if type(error) is _OWN_CODES.get(code) and not _TURNED_AWAY.search(text):
            error.own_code = code
        return error

    def _explain_answer(
        self, status: int, text: str, name: TritonName, model_id: ModelId
    ) -> AdapterError:
        """Return the error for Triton's own answer to an inference.

        `status` is what its HTTP port says, or would say.
        """
        caller_text = self._word_for_caller(text, name, model_id)
        if status == _NOT_IMPLEMENTED and _DECOUPLED.search(text):
            return InvalidRequest(f"{caller_text}{_STREAMS}", model_id=model_id)
        if status in {_NOT_FOUND, _UNAVAILABLE} and _UNKNOWN_MODEL.search(text):
            return ModelNotFound(
                f"Triton does not have the model: {caller_text}", model_id=model_id
            )
        if _is_about_unknown(status, text, has_model=bool(name)):
            return InvalidRequest(caller_text, model_id=model_id)
        verdict = self._classifier.judge(text, phase=Phase.INFER, http_status=status)
        if verdict.strength is Strength.STRONG:
            return _make_out_of_memory(caller_text, verdict, model_id)
        return _explain_execution(status, text, caller_text, verdict, model_id)


def is_not_explicit(text: str) -> bool:
    """Return whether Triton refused a load or unload because of its model control mode."""
    return text.startswith(_NOT_EXPLICIT)


def _is_about_unknown(status: int, text: str, *, has_model: bool) -> bool:
    """Return whether a call is at fault because it names what Triton does not know: a method, a
    region of shared memory, a log setting, or a version of the model.
    """
    if status == _NOT_IMPLEMENTED or _NO_REGION.match(text):
        return True
    if not has_model and _NO_SETTING.match(text):
        return True
    return status in {_NOT_FOUND, _UNAVAILABLE} and _UNKNOWN_VERSION.search(text) is not None


def _explain_execution(
    status: int, text: str, caller_text: str, verdict: Verdict, model_id: ModelId
) -> AdapterError:
    """Return the error for an inference that failed while the model ran, without a proven lack of
    memory: StubDied, Overloaded (503), InferenceFailed (404, and from 500 on) or InvalidRequest.

    `caller_text` is Triton's `text` under the caller's name of the model.
    """
    suspected = verdict.matched
    of_shm = verdict.of_shm
    if _DEAD_STUB.search(text):
        return StubDied(caller_text, model_id=model_id, suspected=suspected)
    if status == _UNAVAILABLE:
        return Overloaded(caller_text, model_id=model_id, delivered=True)
    # 404 here is the model's own (TritonError.NOT_FOUND); to the platform it would say 'reload'
    if status >= _SERVER_ERROR or status == _NOT_FOUND:
        caller_text = _add_environment_advice(caller_text)
        return InferenceFailed(caller_text, model_id=model_id, suspected=suspected, of_shm=of_shm)
    return InvalidRequest(caller_text, model_id=model_id)


def _add_backend_advice(text: str) -> str:
    """Add to Triton's text about a missing backend what can be done."""
    if not _NO_BACKEND.search(text):
        return text
    return (
        f"{text}\nTriton itself lacks this backend: see its --backend-directory; or the config"
        " names another backend than is meant"
    )


def _add_crash_advice(text: str) -> str:
    """Add to Triton's text about a python process that has gone during a load what became of it."""
    if not _DEAD_IN_LOAD.search(text):
        return text
    return (
        f"{text}\nA python process ended while the model was being loaded: it crashed, called exit"
        " or was killed; see docs/operations.md#a-load-is-refused-or-fails"
    )


def _add_environment_advice(text: str) -> str:
    """Add to Triton's text about a missing Python module what can be done."""
    if not _NO_MODULE.search(text):
        return text
    return (
        f"{text}\nThe Python that runs the model does not have the module; install it there, or"
        f" bring it along: {ENVIRONMENTS}"
    )


def _explain_transport(
    code: str, text: str, caller_text: str, model_id: ModelId | None, *, is_tritons: bool = False
) -> AdapterError | None:
    """Return what grpcio says in Triton's place; None when Triton itself answered."""
    if code == "DEADLINE_EXCEEDED":
        return BackendTimeout("Triton did not answer in time", model_id=model_id)
    if code not in {"UNAVAILABLE", "CANCELLED"} or is_tritons or _TRITONS.match(text):
        return None
    if _NOT_DELIVERED.search(text):
        return BackendUnavailable(
            f"Triton cannot be reached: {caller_text}", model_id=model_id, delivered=False
        )
    if _LOST.search(text):
        return BackendUnavailable(
            f"the connection to Triton broke: {caller_text}", model_id=model_id, delivered=True
        )
    return None


def _make_out_of_memory(text: str, verdict: Verdict, model_id: ModelId | None) -> OutOfMemory:
    return OutOfMemory(
        text,
        model_id=model_id,
        figures=MemoryFigures(needed_bytes=verdict.requested_bytes),
        matched=verdict.matched,
        pattern=verdict.rule,
    )
