"""Real texts of Triton 2.51 and of grpcio, and the error that each becomes."""

import pytest

from adapter.core.model import ModelId, TritonName
from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.errors import (
    AlreadyRegistered,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    NotJson,
    NotRegistered,
    OutOfMemory,
    Overloaded,
    PayloadTooLarge,
    StubDied,
)
from tests.cases import rows

FAULTS = Faults(Classifier())
M = ModelId("m")
JSON, PLAIN = "application/json", "text/plain; charset=utf-8"
# the ends of what Triton says of a body that is too large for it
OVER = "bytes exceeds the maximum allowed input size of 67108864"
USE = "Use --http-max-input-size to increase the limit."


def control(code: str, text: str, name: str = "m", model_id: str = "m"):
    return FAULTS.explain_control(code, text, name=TritonName(name), model_id=ModelId(model_id))


def inference(status: int, kind: str, text: str, name: str = "m", model_id: str = "m"):
    found = FAULTS.explain_inference(
        status, kind, text, name=TritonName(name), model_id=ModelId(model_id)
    )
    assert (found.model_id or "") == model_id
    return found


def grpc(code: str, text: str, name: str = "m", model_id: str = "m"):
    found = FAULTS.explain_grpc_inference(
        code, text, name=TritonName(name), model_id=ModelId(model_id)
    )
    assert (found.model_id or "") == model_id
    return found


def failed(inner: str) -> str:
    return f"load failed for model 'm': version 1 is at UNAVAILABLE state: {inner};\n"


def raised(inner: str) -> str:
    return (
        f"Failed to process the request(s) for model 'm_0_0', message: {inner}\n\n"
        "At:\n  /models/m/1/model.py(31): execute\n"
    )


CUDA = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
    "of 15.90 GiB of which 1.50 GiB is free."
)

DALI = (
    "Runtime error: Critical error in pipeline:\nError when executing GPU operator Resize "
    "encountered:\nCan't allocate 4489633332 bytes on device 0.\nCurrent pipeline object is no "
    "longer valid."
)
NOBODY = "failed to connect to all addresses; last error"


@rows(
    ("code", "text", "kind"),
    [
        ("INVALID_ARGUMENT", failed("Internal: ValueError: no weights"), LoadFailed),
        ("INVALID_ARGUMENT", failed(f"Internal: {CUDA}"), OutOfMemory),
        ("INVALID_ARGUMENT", failed("Internal: MemoryError: <EMPTY MESSAGE>"), OutOfMemory),
        (
            "INVALID_ARGUMENT",
            failed("Unavailable: memory limit set for GPU 0 has exceeded"),
            OutOfMemory,
        ),
        ("INVALID_ARGUMENT", failed("Internal: Stub process 'm_0_0' is not healthy."), LoadFailed),
        ("INTERNAL", "failed to load 'm', failed to poll from model repository", LoadFailed),
        ("INTERNAL", "failed to load 'OOM', failed to poll from model repository", LoadFailed),
        ("INTERNAL", "failed to load 'm', no version is available", LoadFailed),
        (
            "UNAVAILABLE",
            "explicit model load / unload is not allowed if polling is enabled",
            BackendError,
        ),
        # grpcio's own limit: the words are lost, and it is no lack of memory
        (
            "RESOURCE_EXHAUSTED",
            "received metadata size exceeds hard limit (value length 300186 vs. 16384)",
            LoadFailed,
        ),
        ("RESOURCE_EXHAUSTED", "CLIENT: Sent message larger than max (5039 vs. 1000)", LoadFailed),
        ("RESOURCE_EXHAUSTED", f"Internal: {CUDA}", LoadFailed),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", BackendTimeout),
        ("UNKNOWN", "", LoadFailed),
    ],
)
def test_a_control_call_that_failed_becomes(code, text, kind):
    error = control(code, text)
    assert type(error) is kind
    assert error.model_id == "m"


def test_missing_module_names_where_to_read_on():
    said = "ModuleNotFoundError: No module named 'sklearn'\n\nAt:\n  /r/m/1/model.py(2): <module>\n"
    text = failed(f"Internal: {said}")

    load = control("INVALID_ARGUMENT", text)
    request = inference(500, PLAIN, said)

    assert (type(load), type(request)) == (LoadFailed, InferenceFailed)
    for error in load, request:
        assert "No module named 'sklearn'" in str(error)
        assert str(error).endswith(": docs/packages.md#python-environments")


@pytest.mark.parametrize(
    "said",
    [
        "Invalid argument: unable to find backend library for backend 'onnxruntime', try ...",
        "Internal: triton_python_backend_stub is not found. Searched paths: /opt/x and /opt/y",
    ],
)
def test_missing_backend_is_no_fault_of_package(said):
    error = control("INVALID_ARGUMENT", failed(said))
    assert type(error) is LoadFailed
    assert said in str(error)
    assert "\nTriton itself lacks this backend: see its --backend-directory" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        f"{NOBODY}: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host (111)",
        f"{NOBODY}: UNAVAILABLE: ipv4:127.0.0.1:1: Endpoint closing",
        "DNS resolution failed for triton:8001: C-ares status is not ARES_SUCCESS",
        f"{NOBODY}: UNAVAILABLE: unix:/t: No such file or directory",
    ],
)
def test_call_that_found_no_triton_was_not_delivered(text):
    error = control("UNAVAILABLE", text)
    assert type(error) is BackendUnavailable
    assert error.delivered is False
    assert "Triton cannot be reached" in str(error)


@rows(
    ("code", "text"),
    [
        ("UNAVAILABLE", "Socket closed"),
        ("UNAVAILABLE", "Stream removed (Socket closed)"),
        ("UNAVAILABLE", "Connection reset by peer"),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer"),
        ("UNAVAILABLE", "GOAWAY received"),
        ("UNAVAILABLE", "keepalive watchdog timeout"),
        ("UNAVAILABLE", "ping timeout"),
        ("UNAVAILABLE", "Too many pings"),
        ("CANCELLED", "Stream removed"),
    ],
)
def test_a_call_whose_connection_broke_may_have_arrived(code, text):
    error = control(code, text)
    assert type(error) is BackendUnavailable
    assert error.delivered is True


@rows(
    ("status", "kind", "text", "expected"),
    [
        (404, PLAIN, "Request for unknown model: 'm' is not found", ModelNotFound),
        (404, PLAIN, "Request for unknown model: 'm' has no available versions", ModelNotFound),
        # the model is there: a 404 would have the platform load it again, for any wrong version
        (404, PLAIN, "Request for unknown model: 'm' version 99 is not found", InvalidRequest),
        (503, PLAIN, "Request for unknown model: 'm' version 99 is not found", InvalidRequest),
        (503, PLAIN, "'m' version 1 is not at ready state", ModelNotFound),
        (503, PLAIN, "[request id: 7] 'm' version 1 is not at ready state", ModelNotFound),
        (
            404,
            PLAIN,
            "[request id: <id_unknown>] Request for unknown model: 'm' is not found",
            ModelNotFound,
        ),
        # TritonError.NOT_FOUND of the model itself: to the platform a 404 would say 'load it'
        (404, PLAIN, raised("no such user"), InferenceFailed),
        (500, PLAIN, raised("IndexError: list index out of range"), InferenceFailed),
        (500, PLAIN, raised(CUDA), OutOfMemory),
        (500, PLAIN, raised("MemoryError: <EMPTY MESSAGE>"), OutOfMemory),
        (503, PLAIN, "failed to allocate GPU memory: out of memory", OutOfMemory),
        (
            400,
            PLAIN,
            DALI,
            OutOfMemory,
        ),
        (500, PLAIN, "Stub process 'm_0_0' is not healthy.", StubDied),
        (
            500,
            PLAIN,
            "in ensemble 'm', Stub process 'inner_0_0' is not healthy.",
            StubDied,
        ),
        (503, PLAIN, "[request id: <id_unknown>] Exceeds maximum queue size", Overloaded),
        (
            400,
            PLAIN,
            "unexpected inference input 'CUDA out of memory' for model 'm'",
            InvalidRequest,
        ),
        (
            400,
            PLAIN,
            "[request id: out of memory] expected 1 inputs but got 2 inputs for model 'm'",
            InvalidRequest,
        ),
        # found while parsing: the caller's fault, though Triton says 500
        (500, JSON, "failed to parse the request JSON buffer: Invalid value. at 0", NotJson),
        (500, JSON, "Unable to parse 'data': out of memory", InvalidRequest),
        (400, JSON, f"request JSON size of 70000000 {OVER} bytes. {USE}", PayloadTooLarge),
        (
            400,
            JSON,
            f"request size of 8 bytes with input 'IN' of size 9 {OVER}. {USE}",
            PayloadTooLarge,
        ),
        (400, JSON, f"input named '{OVER}. {USE}' is not there", InvalidRequest),
        (501, PLAIN, "Unsupported Content-Encoding: br", InvalidRequest),
        (501, JSON, "infer on decoupled model is not supported", InvalidRequest),
        (413, PLAIN, "too large", InvalidRequest),
        (500, PLAIN, "", InferenceFailed),
        (502, PLAIN, "", InferenceFailed),
    ],
)
def test_an_inference_that_failed_becomes(status, kind, text, expected):
    assert type(inference(status, kind, text)) is expected


@pytest.mark.parametrize("said", ["HTTP end point", "ModelInfer RPC"])
def test_decoupled_inference_learns_the_right_calls(said):
    text = f"{said} doesn't support models with decoupled transaction policy"
    error = inference(501, JSON, text)
    assert type(error) is InvalidRequest
    assert str(error) == (
        f"{text}; it takes generate_stream, over gRPC ModelStreamInfer, at the endpoint"
        " InvokeEndpointWithResponseStream"
    )


UNKNOWN = "Request for unknown model: 'm'"
CALLERS = ("UNIMPLEMENTED", "ALREADY_EXISTS")  # no lack of memory
OWN_CODES = (*CALLERS, "UNKNOWN", "CANCELLED", "UNAVAILABLE")


@rows(
    ("code", "text", "expected"),
    [
        ("NOT_FOUND", f"{UNKNOWN} is not found", ModelNotFound),
        ("NOT_FOUND", f"{UNKNOWN} has no available versions", ModelNotFound),
        ("NOT_FOUND", f"[request id: 7] {UNKNOWN} is not found", ModelNotFound),
        ("UNAVAILABLE", f"{UNKNOWN} is not found", ModelNotFound),
        ("UNAVAILABLE", "'m' version 1 is not at ready state", ModelNotFound),
        ("NOT_FOUND", f"{UNKNOWN} version 99 is not found", InvalidRequest),
        ("UNAVAILABLE", f"{UNKNOWN} version 99 is not found", InvalidRequest),
        ("NOT_FOUND", raised("no such user"), InferenceFailed),
        ("NOT_FOUND", raised("no such user").rstrip() + " is not found", InferenceFailed),
        ("INTERNAL", f"{UNKNOWN} is not found", InferenceFailed),
        ("INTERNAL", raised("IndexError: list index out of range"), InferenceFailed),
        ("INTERNAL", raised(CUDA), OutOfMemory),
        ("UNAVAILABLE", raised(CUDA), OutOfMemory),
        ("UNKNOWN", DALI, OutOfMemory),
        ("UNKNOWN", "Runtime error: Critical error in pipeline", InferenceFailed),
        ("UNKNOWN", "", InferenceFailed),
        ("CANCELLED", raised("request was cancelled"), InferenceFailed),
        ("INTERNAL", "Stub process 'm_0_0' is not healthy.", StubDied),
        ("UNIMPLEMENTED", "ModelInfer RPC doesn't support decoupled models", InvalidRequest),
        ("INVALID_ARGUMENT", "unexpected inference input 'CUDA out of memory'", InvalidRequest),
        ("INVALID_ARGUMENT", "model 'm', tensor 'x': 2 > 1", InvalidRequest),
        ("ALREADY_EXISTS", "a sequence of this id is under way", InvalidRequest),
        ("UNAVAILABLE", "[request id: 7] Exceeds maximum queue size", Overloaded),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", BackendTimeout),
        ("RESOURCE_EXHAUSTED", "CLIENT: Sent message larger than max (5 vs. 1)", PayloadTooLarge),
        (
            "RESOURCE_EXHAUSTED",
            "SERVER: Received message larger than max (5 vs. 1)",
            PayloadTooLarge,
        ),
        ("RESOURCE_EXHAUSTED", "Received message larger than max (5 vs. 1)", PayloadTooLarge),
        (
            "RESOURCE_EXHAUSTED",
            "CLIENT: Received message larger than max (5 vs. 1)",
            InferenceFailed,
        ),
        ("RESOURCE_EXHAUSTED", "SERVER: Sent message larger than max (5 vs. 1)", InferenceFailed),
        ("RESOURCE_EXHAUSTED", "received metadata size exceeds hard limit", InvalidRequest),
        ("RESOURCE_EXHAUSTED", "received initial metadata size exceeds limit", InvalidRequest),
        ("RESOURCE_EXHAUSTED", raised(CUDA), InferenceFailed),
    ],
)
def test_an_inference_over_grpc_that_failed_becomes(code, text, expected):
    assert type(grpc(code, text)) is expected


@pytest.mark.parametrize(
    ("code", "text", "delivered"),
    [
        ("UNAVAILABLE", f"{NOBODY}: UNKNOWN: ipv4:127.0.0.1:1: Connection refused (111)", False),
        ("UNAVAILABLE", "Socket closed", True),
        ("CANCELLED", "Stream removed", True),
        ("UNAVAILABLE", "Exceeds maximum queue size", True),
        # Triton was there: the words are the caller's or the model's
        ("UNAVAILABLE", "[request id: connection refused] Exceeds maximum queue size", True),
        ("UNAVAILABLE", raised("the store is down: connection refused"), True),
        ("UNAVAILABLE", f"in ensemble 'e', {raised('connection refused')}", True),
    ],
)
def test_grpc_inference_repeats_only_without_triton(code, text, delivered):
    error = grpc(code, text)
    assert isinstance(error, BackendUnavailable)
    assert error.delivered is delivered


STUB = "Stub process 'm_0_0' is not healthy."


@pytest.mark.parametrize(
    ("error", "kind", "phrase"),
    [
        (control("INVALID_ARGUMENT", failed(STUB)), LoadFailed, "Stub process '' is not healthy"),
        (inference(500, PLAIN, STUB), StubDied, "Stub process '' is not healthy"),
        (grpc("INTERNAL", STUB), StubDied, "Stub process '' is not healthy"),
        (
            inference(500, PLAIN, raised("CUDNN_STATUS_NOT_INITIALIZED")),
            InferenceFailed,
            "CUDNN_STATUS_NOT_INITIALIZED",
        ),
        (
            grpc("INTERNAL", "unable to enqueue for inference m_0_0"),
            InferenceFailed,
            "unable to enqueue for inference",
        ),
    ],
)
def test_ambiguous_memory_words_are_a_suspicion(error, kind, phrase):
    assert type(error) is kind
    assert error.suspected == phrase


@rows(
    ("code", "text", "own"),
    [
        *((code, "its own words", code) for code in OWN_CODES),
        *((code, raised("its own words"), code) for code in OWN_CODES),
        *((code, raised(CUDA), None) for code in OWN_CODES if code not in CALLERS),
        ("NOT_FOUND", "its own words", None),
        ("UNAVAILABLE", "[request id: 7] Exceeds maximum queue size", None),
        ("UNAVAILABLE", "[request id: 7] Request timeout expired", None),
        ("UNAVAILABLE", f"{UNKNOWN} version 99 is not found", None),
        ("UNAVAILABLE", f"{UNKNOWN} is not found", None),
    ],
)
def test_models_own_code_is_kept_but_two(code, text, own):
    """NOT_FOUND and RESOURCE_EXHAUSTED mean something else to callers."""
    assert grpc(code, text).own_code == own


def test_model_quoting_a_dead_process_is_alive():
    """Models repeat their input in errors; a caller must not declare another's model dead."""
    text = raised("ValueError: unknown label: Stub process 'm_0_0' is not healthy.")
    assert type(inference(500, PLAIN, text)) is InferenceFailed


def test_request_id_cannot_imitate_unknown_model():
    """The id is the caller's choice, and 404 makes the platform load the model again."""
    text = "[request id: x] Request for unknown model: ] Exceeds maximum queue size"
    assert type(inference(503, PLAIN, text)) is Overloaded


PRIVATE, PUBLIC = "ta.u.team_2fa_20b", "team/a b"


def test_part_of_a_package_has_its_own_name():
    said = "ensemble 'm' depends on 'ta.p.6cbf83e080936a8f.my_5fstep' whose required version 3"
    assert "depends on 'my_step' whose" in str(control("INVALID_ARGUMENT", said))
    said = raised("no").replace("m_0_0", "ta.p.6cbf83e080936a8f.step_0_0")
    assert "for model 'step_0_0', message: no" in str(inference(500, PLAIN, said))


def test_name_is_replaced_as_a_whole_word():
    """A made name of the model "m" may be a part of Triton's words, such as "model"."""
    text = "load failed for model 'm#1': in 'm#1.step' m#1_0_0 m#10"
    error = control("INTERNAL", text, "m#1", "cat")
    assert "model 'cat': in 'cat.step' cat_0_0 m#10" in str(error)


def test_caller_reads_name_that_caller_gave():
    text = f"load failed for model '{PRIVATE}': version 1 is at UNAVAILABLE state: Internal: x;\n"
    shown = f"load failed for model '{PUBLIC}': version 1 is at UNAVAILABLE state: Internal: x"
    assert str(control("INVALID_ARGUMENT", text, PRIVATE, PUBLIC)) == shown
    unknown = f"Request for unknown model: '{PRIVATE}' is not found"
    shown = f"Triton does not have the model: Request for unknown model: '{PUBLIC}' is not found"
    assert str(inference(404, PLAIN, unknown, PRIVATE, PUBLIC)) == shown
    assert str(grpc("NOT_FOUND", unknown, PRIVATE, PUBLIC)) == shown


@pytest.mark.parametrize(
    "model_id", ["connection refused", "socket closed", "failed to connect", "broken pipe"]
)
def test_model_named_like_network_fault_is_none(model_id):
    """Its private name has no blanks; only the text made for the caller could be misread."""
    name = "ta.u." + model_id.replace(" ", "_20")
    error = control("UNAVAILABLE", f"cannot load '{name}' now", name, model_id)
    assert type(error) is LoadFailed


@pytest.mark.parametrize(
    "request_id", ["r7", "x" * 5000, "two\nlines", "a] b", "Stub process 'n' is not healthy."]
)
def test_death_is_seen_whatever_request_was_called(request_id):
    text = f"[request id: {request_id}] {STUB}"
    assert type(inference(500, PLAIN, text)) is StubDied


NO_REGION = "Unable to find shared memory region: 'nobody'"


def test_absent_shared_memory_region_blames_the_caller():
    assert type(inference(404, JSON, NO_REGION)) is InvalidRequest
    assert type(grpc("NOT_FOUND", NO_REGION)) is InvalidRequest
    assert type(grpc("NOT_FOUND", f"{NO_REGION}, said the model")) is InferenceFailed


def test_invalid_log_setting_is_callers_fault():
    text = "invalid argument for --log_format, got: AAA"
    assert type(FAULTS.explain_server_call("UNAVAILABLE", text)) is InvalidRequest
    assert type(inference(503, JSON, text, "", "")) is InvalidRequest
    assert type(inference(503, JSON, text)) is Overloaded  # a model may say anything


def test_region_codes_are_kept_without_a_model():
    missing, there = "Unable to find system shared memory region: 'r'", "already in manager"
    assert type(FAULTS.explain_server_call("NOT_FOUND", missing)) is NotRegistered
    assert type(FAULTS.explain_server_call("ALREADY_EXISTS", there)) is AlreadyRegistered
    assert type(inference(404, JSON, missing, "", "")) is NotRegistered
    no_memory = "Unable to open shared memory region: '/none'"
    assert type(FAULTS.explain_server_call("INTERNAL", no_memory)) is InvalidRequest


@pytest.mark.parametrize("path", ["/opt/models/m/1/a.txt", "/my-models/m", "/models.old/m"])
def test_path_outside_the_repository_stays_whole(path):
    faults = Faults(Classifier(), "/models")
    error = faults.explain_control("INTERNAL", f"No such file: '{path}'", model_id=ModelId("x"))
    assert path in str(error)


def test_no_text_tells_where_tritons_repository_is():
    faults = Faults(Classifier(), "/tmp/private/repository")
    text = "failed\n\nAt:\n  /tmp/private/repository/m/1/model.py(7): execute\n"
    found = faults.explain_grpc_inference("INTERNAL", text, name=TritonName("m"), model_id=M)
    assert str(found) == "failed\n\nAt:\n  m/1/model.py(7): execute"
