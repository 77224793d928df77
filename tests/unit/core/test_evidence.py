"""When memory counts as having been low, and which failures that makes a lack of memory."""

import pytest

from adapter.core.evidence import (
    DeviceSample,
    MemorySample,
    View,
    corroborated,
    sample_of,
    view_of,
    view_of_shm,
)
from adapter.core.faults import Faults
from adapter.core.ledger import DeviceBook, LedgerSnapshot
from adapter.core.memory import HOST, NO_BYTES, Device, DeviceReading, MemoryReading
from adapter.core.model import ModelId, TritonName
from adapter.core.oom import Classifier
from adapter.errors import (
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    InvalidRequest,
    LoadFailed,
    MemoryFigures,
    ModelNotFound,
    OutOfMemory,
    Overloaded,
    StubDied,
)
from tests.cases import rows

MIB = 2**20
GPU, OTHER = Device("GPU-0"), Device("GPU-1")


def observed(free, headroom=0, **more):
    return MemorySample({GPU: DeviceSample(free * MIB, 1000 * MIB, headroom * MIB)}, **more)


def view(*samples, predicted=NO_BYTES):
    return view_of(samples, predicted=predicted)


# -- the view -----------------------------------------------------------------------------------


def test_without_a_sample_nobody_knows():
    assert view() is View.UNKNOWN
    assert view(predicted={GPU: MIB}) is View.UNKNOWN


def test_a_sample_that_shows_no_memory_at_all_is_none():
    assert view(MemorySample({})) is View.UNKNOWN


@pytest.mark.parametrize(
    ("free", "headroom", "expected"),
    [(50, 0, View.OK), (49, 0, View.LOW), (100, 100, View.OK), (99, 100, View.LOW)],
)
def test_less_free_than_the_headroom_or_a_twentieth_is_low(free, headroom, expected):
    assert view(observed(free, headroom)) is expected


@pytest.mark.parametrize("at", range(3))
def test_one_low_sample_is_enough(at):
    samples = [observed(500)] * 3
    samples[at] = observed(10)
    assert view(*samples) is View.LOW


def test_one_low_device_is_enough():
    devices = {GPU: DeviceSample(900, 1000, 0), OTHER: DeviceSample(10, 1000, 0)}
    assert view(MemorySample(devices)) is View.LOW


def test_less_free_at_first_than_the_call_was_to_take_is_low():
    assert view(observed(300), predicted={GPU: 301 * MIB}) is View.LOW
    assert view(observed(300), predicted={GPU: 300 * MIB}) is View.OK


def test_what_the_call_itself_took_does_not_make_memory_low():
    assert view(observed(300), observed(60), predicted={GPU: 300 * MIB}) is View.OK


def test_a_prediction_for_a_device_that_is_not_seen_says_nothing():
    assert view(observed(300), predicted={OTHER: 10**15}) is View.OK


@pytest.mark.parametrize(
    ("free", "expected"), [(None, View.OK), (MIB, View.OK), (MIB - 1, View.LOW), (0, View.LOW)]
)
def test_shared_memory_below_a_mebibyte_is_low(free, expected):
    assert view(observed(500, shm_free_bytes=free)) is expected


@pytest.mark.parametrize(
    ("kills", "expected"),
    [
        ((3, 3), View.OK),
        ((3, 4), View.LOW),
        ((None, 3), View.OK),
        ((3, None, 4), View.LOW),
        ((4, 0), View.OK),  # another container: the count began anew
    ],
)
def test_a_process_killed_for_memory_meanwhile_is_low(kills, expected):
    assert view(*(observed(500, oom_kills=count) for count in kills)) is expected


def test_what_is_seen_is_observed_and_not_promised():
    book = LedgerSnapshot({GPU: DeviceBook(800, 80, 100, 200, 300)}, models=1)
    reading = MemoryReading(
        {GPU: DeviceReading(1000, 500), OTHER: DeviceReading(64, 4)},
        shm_free_bytes=7,
        oom_kills=2,
    )
    assert sample_of(book, reading) == MemorySample(
        {GPU: DeviceSample(300, 800, 80), OTHER: DeviceSample(60, 64, 0)},
        shm_free_bytes=7,
        oom_kills=2,
    )


# -- docs/memory.md, which failures are 507: a case for each row and each state of memory --------

FAULTS = Faults(Classifier())
M, T = ModelId("m"), TritonName("m")
PLAIN = "text/plain; charset=utf-8"
STUB = "Stub process 'm_0_0' is not healthy."
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."


def load(code, inner):
    text = f"load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: {inner};\n"
    return FAULTS.of_control(code, text, name=T, model_id=M)


def infer(status, text):
    return FAULTS.of_inference(status, PLAIN, text, name=T, model_id=M)


def grpc(code, text):
    return FAULTS.of_grpc_inference(code, text, name=T, model_id=M)


def raised(text):
    return f"Failed to process the request(s) for model 'm_0_0', message: {text}"


SHM = "Failed to increase the shared memory pool size for key 'k': No space left on device"
LIMIT = "memory limit set for GPU 0 has exceeded"

# (failure, what it becomes while memory is low; it stays what it is while memory is ok or unknown)
TABLE = [
    (lambda: load("INVALID_ARGUMENT", CUDA), OutOfMemory, OutOfMemory),
    (lambda: infer(500, raised(CUDA)), OutOfMemory, OutOfMemory),
    (lambda: infer(503, CUDA), OutOfMemory, OutOfMemory),
    (lambda: grpc("UNKNOWN", f"Critical error: {CUDA}"), OutOfMemory, OutOfMemory),
    (lambda: infer(400, "input 'CUDA out of memory' is missing"), InvalidRequest, InvalidRequest),
    (lambda: infer(400, f"expected 1 input, got {STUB}"), InvalidRequest, InvalidRequest),
    (lambda: infer(404, raised(CUDA)), InferenceFailed, InferenceFailed),
    (lambda: infer(501, CUDA), InvalidRequest, InvalidRequest),
    (lambda: load("INVALID_ARGUMENT", SHM), OutOfMemory, OutOfMemory),
    (lambda: infer(500, raised(SHM)), OutOfMemory, OutOfMemory),
    (lambda: load("INVALID_ARGUMENT", "No space left on device"), LoadFailed, LoadFailed),
    (lambda: infer(500, raised("No space left on device")), InferenceFailed, InferenceFailed),
    (lambda: load("INVALID_ARGUMENT", STUB), OutOfMemory, LoadFailed),
    (lambda: infer(500, STUB), OutOfMemory, StubDied),
    (lambda: grpc("INTERNAL", STUB), OutOfMemory, StubDied),
    (lambda: infer(500, "unable to enqueue for inference m_0"), OutOfMemory, InferenceFailed),
    (lambda: infer(500, raised("CUDNN_STATUS_NOT_INITIALIZED")), OutOfMemory, InferenceFailed),
    (
        lambda: load("INVALID_ARGUMENT", "Engine core initialization failed."),
        OutOfMemory,
        LoadFailed,
    ),
    (lambda: load("INVALID_ARGUMENT", f"Unavailable: {LIMIT}"), OutOfMemory, OutOfMemory),
    (lambda: infer(503, "Exceeds maximum queue size"), Overloaded, Overloaded),
    (
        lambda: infer(404, "Request for unknown model: 'm' is not found"),
        ModelNotFound,
        ModelNotFound,
    ),
    (lambda: grpc("RESOURCE_EXHAUSTED", CUDA), InferenceFailed, InferenceFailed),
    (lambda: load("RESOURCE_EXHAUSTED", STUB), LoadFailed, LoadFailed),
    (lambda: grpc("DEADLINE_EXCEEDED", "Deadline Exceeded"), BackendTimeout, BackendTimeout),
    (lambda: grpc("UNAVAILABLE", "Socket closed"), BackendUnavailable, BackendUnavailable),
    (lambda: load("INVALID_ARGUMENT", "ValueError: x"), LoadFailed, LoadFailed),
    (lambda: infer(500, raised("ValueError: x")), InferenceFailed, InferenceFailed),
]


@rows(("failure", "low", "otherwise"), TABLE)
def test_a_failure_is_answered_as_the_table_says(failure, low, otherwise):
    for memory, expected in ((View.LOW, low), (View.OK, otherwise), (View.UNKNOWN, otherwise)):
        error = failure()
        answer = corroborated(error, memory, MemoryFigures())
        assert type(answer) is expected, memory
        assert answer is error or (memory is View.LOW and low is not otherwise)


def test_a_second_opinion_keeps_the_words_and_the_cause_and_says_why():
    error, cause = StubDied(STUB, model_id="m", suspected="is not healthy"), OSError()
    error.__cause__ = cause
    figures = MemoryFigures(3, 2, 1, HOST)
    answer = corroborated(error, View.LOW, figures)
    assert str(answer) == f"{STUB} (memory was low at that time)"
    assert (answer.model_id, answer.figures, answer.matched) == ("m", figures, "is not healthy")
    assert answer.__cause__ is cause


def test_where_only_shared_memory_can_explain_a_failure_nothing_else_is_looked_at():
    low, full = observed(0), observed(500, shm_free_bytes=MIB - 1)
    assert view_of_shm([low]) is View.UNKNOWN
    assert view_of_shm([observed(0, shm_free_bytes=MIB)]) is View.OK
    assert view_of_shm([observed(500, shm_free_bytes=MIB), full]) is View.LOW


@pytest.mark.parametrize(
    "text",
    ["[Errno 28] No space left on device", "Unable to initialize shared memory key 'k' to requ"],
)
def test_failures_that_only_a_full_shared_memory_explains_say_so(text):
    failed = f"load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: {text};"
    faults = Faults(Classifier())
    at_load = faults.of_control("INVALID_ARGUMENT", failed, model_id=ModelId("m"))
    at_inference = faults.of_grpc_inference(
        "INTERNAL", f"OSError: {text}", name=TritonName("m"), model_id=ModelId("m")
    )
    assert (type(at_load), at_load.of_shm) == (LoadFailed, True)
    assert (type(at_inference), at_inference.of_shm) == (InferenceFailed, True)
