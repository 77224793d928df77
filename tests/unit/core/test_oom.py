"""The out-of-memory classifier against labelled texts, its rules one by one, and hostile texts."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.core.oom import Classifier, Phase, Strength
from tests.cases import rows

_DATA = Path(__file__).parents[2] / "data"
_LOADED = "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: {};\n"
_EXECUTED = "Failed to process the request(s) for model 'm_0_0', message: {}\n\nAt:\n  m.py(3): f\n"


def judge(text, *, phase=Phase.INFER, http_status=500, extra=()):
    return Classifier(extra).judge(text, phase=phase, http_status=http_status)


def raised(text):
    return judge(_EXECUTED.format(text))


def labelled(file):
    for line in (_DATA / file).read_text().splitlines():
        row = json.loads(line)
        if not row.get("ambiguous"):
            yield row


def is_strong(row):
    phase = Phase(row["phase"])
    status = row.get("http_status", 400 if phase is Phase.LOAD else 500)
    return judge(row["text"], phase=phase, http_status=status).strength is Strength.STRONG


@pytest.mark.parametrize("file", ["triton_failure_texts.jsonl", "more_failure_texts.jsonl"])
def test_other_failures_are_not_out_of_memory(file):
    rows = [row for row in labelled(file) if not row["is_oom"]]
    assert len(rows) > 50
    assert [row["text"] for row in rows if is_strong(row)] == []


@pytest.mark.parametrize("file", ["triton_failure_texts.jsonl", "more_failure_texts.jsonl"])
def test_out_of_memory_is_recognised(file):
    rows = [row for row in labelled(file) if row["is_oom"]]
    assert len(rows) > 40
    assert [row["text"] for row in rows if not is_strong(row)] == []


@rows(
    "text",
    [
        "CNMEM_STATUS_OUT_OF_MEMORY",
        "cuMemCreate failed",
        "OOM when allocating tensor with shape[2,3]",
        "torch.cuda.OutOfMemoryError",
        "rmm: out_of_memory: RMM failure at: pool.hpp",
        "maxTokensInPagedKvCache (5) must be large enough to process",
        "OSError: [Errno 12] somewhere",
        "_ArrayMemoryError: too big",
        "CPU memory allocation failed",
        "the container was OOMKilled",
    ],
)
def test_phrase_that_no_sample_has_is_strong(text):
    assert raised(text).strength is Strength.STRONG


def test_narrowest_rule_names_the_failure():
    assert raised("OutOfMemoryError: CUDA out of memory.").rule == "cuda_out_of_memory"


@rows(
    ("text", "of_shm"),
    [
        ("Stub process 'm_0_0' is not healthy.", False),
        ("Failed to initialize stub, stub process exited unexpectedly: m_0", False),
        ("unable to enqueue for inference m_0_0", False),
        ("unable to create TensorRT context: ", False),
        ("CUDNN failure 1: CUDNN_STATUS_NOT_INITIALIZED ; GPU=0", False),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART", False),
        ("cuFFT error: CUFFT_INTERNAL_ERROR", False),
        ("INTERNAL: no supported devices found for platform CUDA", False),
        ("[GPU] CL_OUT_OF_RESOURCES exception", False),
        ("Engine core initialization failed. See above.", False),
        ("worker 3 exited with exit code 137", False),
        ("process 7 was killed by signal 9", False),
        ("OSError: [Errno 28] No space left on device", True),
        ("Unable to initialize shared memory key 'k' to requ", True),
    ],
)
def test_failure_that_memory_may_explain_is_weak(text, of_shm):
    verdict = judge(text)
    assert (verdict.strength, verdict.of_shm) == (Strength.WEAK, of_shm)


def test_a_strong_phrase_wins_over_a_weak_one():
    text = "CUDNN_STATUS_NOT_INITIALIZED after exit code 137: CUDA out of memory."
    assert judge(text).strength is Strength.STRONG


@rows("http_status", [200, 404, 409, 413, 429, 501, 504])
@rows("phase", Phase)
def test_other_statuses_are_never_out_of_memory(phase, http_status):
    assert judge("CUDA out of memory.", phase=phase, http_status=http_status).rule is None


def test_refused_request_needs_strong_words():
    assert judge("CUDA out of memory", http_status=400).strength is Strength.NONE
    assert judge("bad: std::bad_alloc", http_status=400).strength is Strength.STRONG


@pytest.mark.parametrize("kind", ["KeyError", "ValueError", "UnicodeDecodeError"])
def test_error_about_input_counts_only_with_figure(kind):
    assert raised(f"{kind}: bad: CUDA out of memory").strength is Strength.NONE
    figure = f"{kind}: bad: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert raised(figure).requested_bytes == 2 * 2**30


@rows(
    "text",
    [
        "BLOOM, ROOM, ZOOM and OOM",
        "Error: CUDA out of memory2",
        "no such file: out of memory/1/model.onnx",
        "no such file: /models/kind=bad_alloc",
        "no such file: cuda out of memory.onnx",
        "NOTMemoryError: x",
        "address out of memory range",
        "no disk: No space left on device",
        "cannot allocate memory in static TLS block",
        "CUDA out of memory, falling back to the host",
        "out of memory.\n[TRT] [W] Skipping tactic 3",
        "lower it to avoid CUDA out of memory",
        "unexpected token CUDA out of memory",
        'cannot read b"std::bad_alloc"',
        'cannot read "a "std::bad_alloc" b" now',
        "cannot read `std::bad_alloc`",
        "cannot read “std::bad_alloc”",
        "cannot read 'std::bad_alloc and no end",
        r'cannot read "\"a\" std::bad_alloc \"b\""',
        "in ensemble 'p', [request id: x] std::bad_alloc] Exceeds maximum queue size",
        "[request id: Failed to process the request(s) for model '', message: bad_alloc] too late",
        "[request id: std::bad_alloc",
        "[request id: 1] input '] std::bad_alloc' is missing",
        "[request id: ] std::bad_alloc \"] input 'x' is missing",
    ],
)
def test_similar_words_are_not_out_of_memory(text):
    assert judge(text).strength is Strength.NONE


def test_name_that_imitates_failed_load_is_still_name():
    text = "failed to load 'load failed for model ' bad_alloc ': ', no version is available"
    assert judge(text, phase=Phase.LOAD).rule is None


def test_request_id_does_not_hide_what_follows_it():
    assert judge("[request id: 7] failed to allocate GPU memory").rule == "allocation_failed"
    assert judge("std::bad_alloc in [request id: 7] of two").rule == "bad_alloc"


def test_the_first_of_two_failed_versions_is_read():
    text = _LOADED.format("std::bad_alloc") + "version 2 is at UNAVAILABLE state: unloaded;\n"
    assert judge(text, phase=Phase.LOAD, http_status=400).rule == "bad_alloc"


@rows(
    ("text", "requested_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.77 GiB", 20 * 2**20),
        ("MemoryError: Unable to allocate 512. MiB for an array", 512 * 2**20),
        ("Available memory of 3 is smaller than requested bytes of 945041920", 945041920),
        ("Out of memory allocating 8,000,000 bytes (allocated so far: 3 bytes)", 8_000_000),
        ("OutOfMemory (Requested size was 17920000000 bytes.)", 17920000000),
        ("failed to allocate 1073741824 bytes for tensor 'x': out of memory", 2**30),
        ("ran out of memory trying to allocate 2.50GiB", int(2.5 * 2**30)),
        ("shared memory to requested size (4096 bytes). No space left on device", 4096),
        (
            "OutOfMemoryError: Allocation on device 0. (out of memory)\nRequested    : 200.00 GiB",
            200 * 2**30,
        ),
        ("std::bad_alloc", None),
    ],
)
def test_what_the_allocator_was_asked_for_is_read(text, requested_bytes):
    assert raised(text).requested_bytes == requested_bytes


def test_the_phrase_is_shown_as_it_stood():
    assert raised("Error: CuDNN_Status_ALLOC_FAILED.").matched == "CuDNN_Status_ALLOC_FAILED"
    assert raised("\u0130\u0130 std::Bad_Alloc").matched == "Bad_Alloc"


def test_a_users_pattern_is_strong():
    verdict = judge("tank is empty", extra=["tank is (empty|dry)"])
    assert (verdict.strength, verdict.rule) == (Strength.STRONG, "custom")
    assert verdict.matched == "tank is empty"


def test_a_users_pattern_does_not_see_names():
    assert judge("input 'tank is empty'", extra=["tank"]).strength is Strength.NONE
    assert judge("all is well", extra=["tank"]).strength is Strength.NONE


@pytest.mark.parametrize("pattern", ["(", "a*"])
def test_a_users_pattern_that_cannot_work_is_named(pattern):
    with pytest.raises(ValueError, match=r"'(\(|a\*)'"):
        Classifier([pattern])


_ANY_NAME = st.text(max_size=30) | st.lists(
    st.sampled_from(
        [
            *("'", '"', "\\", " ", ":", "] ", "\n", "CUDA out of memory", "std::bad_alloc"),
            *("', message: std::bad_alloc", "': version 1 is at UNAVAILABLE state: bad_alloc"),
            *("load failed for model '", "x ", "]", "[request id: "),
        ]
    ),
    max_size=8,
).map("".join)


_BENIGN = [
    ("unexpected inference input '{}' for model 'm'", Phase.INFER, 400),
    ("unexpected inference output '{}' for model '{}'", Phase.INFER, 400),
    ("[request id: {}] Exceeds maximum queue size", Phase.INFER, 503),
    ("[request id: {}] input '{}' is missing", Phase.INFER, 400),
    (_EXECUTED.replace("m_0_0", "{}").replace("message: {}", "message: bad"), Phase.INFER, 500),
    (_LOADED.replace("'m'", "'{}'").replace("Internal: {}", "bad"), Phase.LOAD, 400),
    ("failed to load '{}', failed to poll from model repository", Phase.LOAD, 500),
]


@settings(max_examples=3 * settings().max_examples)
@given(name=_ANY_NAME)
def test_no_name_makes_benign_failure_out_of_memory(name):
    for template, phase, http_status in _BENIGN:
        text = template.replace("{}", name)
        assert judge(text, phase=phase, http_status=http_status).strength is Strength.NONE, text


def test_a_flood_of_the_phrase_ends_the_search():
    assert judge("may run out of memory. " * 200 + "out of memory").strength is Strength.NONE


def seconds(text, phase, http_status):
    before = time.process_time()
    judge(text, phase=phase, http_status=http_status)
    return time.process_time() - before


_PIECES = [
    *("'a ", "'a' ", '"', "\\", "/", " ", "\n", "`", "“", "[request id: ", "', message: ", "': "),
    *("may out of memory ", "RMM failure ", "failed to allocate a b c ", "KeyError: "),
    *("memoryerror" + " " * 50, "no space left on device ", "\u0130", "exit code "),
]


@rows(
    ("piece", "phase", "http_status"),
    [
        *((piece, Phase.INFER, 500) for piece in _PIECES),
        # what is cut off as the frame of a message is read otherwise in each
        *((piece, Phase.INFER, 400) for piece in ("'a ", "[request id: ", "', message: ")),
        *((piece, Phase.LOAD, 400) for piece in ("'a ", "': ", "', message: ")),
    ],
)
def test_time_grows_with_the_text_and_no_faster(piece, phase, http_status):
    small, large = (piece * (size // len(piece)) for size in (10_000, 100_000))
    fastest = min(seconds(small, phase, http_status) for _ in range(3))
    # ten times the text: quadratic work would take a hundred times as long
    assert any(seconds(large, phase, http_status) < 40 * fastest + 0.02 for _ in range(3))
