"""tritonclient pointed at the adapter says what it says when pointed at Triton."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from tritonclient.utils import triton_to_np_dtype

from tests.cases import rows
from tests.journeys.v2.client_models import KINDS, write_client_models
from tests.journeys.v2.talks import Talk, outcome
from tests.running import RunningAdapter, unload_all, wait_until

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def served(shared_adapter, model_root) -> Iterator[RunningAdapter]:
    """The shared adapter with the models that clients are compared on."""
    with shared_adapter.client() as client:
        for folder in write_client_models(model_root):
            client.load_model(folder.name, folder)
        yield shared_adapter
    unload_all(shared_adapter)


@dataclass(frozen=True)
class Pair:
    """One client twice: at the Triton behind the adapter, and at the adapter."""

    theirs: Talk
    ours: Talk

    def same(self, call) -> object:
        """`call` of either client; equal, and what it was."""
        expected = outcome(lambda: call(self.theirs))
        assert outcome(lambda: call(self.ours)) == expected
        return expected


def paired(served: RunningAdapter, client: str, listener: str) -> Iterator[Pair]:
    is_grpc = client.startswith("grpc")
    theirs = served.grpc_address if is_grpc else served.http_address
    ours = served.listeners[listener]
    with closing(Talk(client, theirs)) as one, closing(Talk(client, ours)) as other:
        yield Pair(one, other)


GRPC_DOORS = [("grpc", "grpc"), ("grpc.aio", "grpc_data")]
ALL_DOORS = [("http", "http"), ("http.aio", "http"), *GRPC_DOORS]


@pytest.fixture(scope="module", params=ALL_DOORS, ids=" at ".join)
def pair(served, request) -> Iterator[Pair]:
    yield from paired(served, *request.param)


@pytest.fixture(scope="module", params=GRPC_DOORS, ids=" at ".join)
def grpc_pair(served, request) -> Iterator[Pair]:
    """Streams and deadlines are gRPC's."""
    yield from paired(served, *request.param)


ABOUT = [
    ("is_server_live",),
    ("is_server_ready",),
    *(("is_model_ready", *model) for model in (("kinds",), ("kinds", "1"), ("kinds", "9"))),
    ("is_model_ready", "nobody"),
    *(
        (f"get_model_{what}", *model)
        for what in ("metadata", "config")
        for model in (("kinds",), ("counts", "1"), ("nobody",))
    ),
]
STATISTICS = [("get_inference_statistics", *model) for model in (("kinds",), ("sums", "1"), ())]


@rows("asked", ABOUT)
def test_what_is_asked_about_server_and_models(pair, asked):
    pair.same(lambda talk: talk.ask(*asked))


@rows("asked", STATISTICS)
def test_statistics_are_those_of_triton(pair, asked):
    """Which goes on to count what a test before this one has asked for and not waited for."""

    def stood_still() -> bool:
        before, ours, after = (each.ask(*asked) for each in (pair.theirs, pair.ours, pair.theirs))
        if before != after:
            return False
        assert ours == before
        return True

    wait_until(stood_still, 30, "Triton counts no more")


UNSERVED = {"system_shared_memory", "cuda_shared_memory", "trace", "logging"}
REPOSITORY = {"model_repository", "model_repository(unload_dependents)"}


@pytest.mark.parametrize(("client", "listener"), ALL_DOORS)
def test_only_served_extensions_are_named(served, client, listener):
    for found in paired(served, client, listener):
        theirs = found.theirs.ask("get_server_metadata")
        ours = found.ours.ask("get_server_metadata")
        closed = UNSERVED | (REPOSITORY if listener == "grpc_data" else set())
        assert closed <= set(theirs["extensions"])
        left = [name for name in theirs["extensions"] if name not in closed]
        assert ours == theirs | {"extensions": left}


VALUES = {
    "BOOL": np.array([True, False]),
    "BYTES": np.array([b"caf\xc3\xa9", b"", b'"\\u0041\n'], np.object_),
    "FP64": np.array([0.1, -1e300]),
    **{k: np.array([0.5, -1.25], triton_to_np_dtype(k)) for k in ("BF16", "FP16", "FP32")},
    **{
        kind: np.array([info.min, 0, info.max], info.dtype)
        for kind in KINDS
        if "INT" in kind
        for info in [np.iinfo(triton_to_np_dtype(kind))]
    },
}
assert VALUES.keys() == KINDS.keys()


def given(talk: Talk, kind: str, *, binary: bool = True) -> object:
    return talk.input(f"IN_{kind}", kind, VALUES[kind], binary=binary)


def received(kind: str, *, binary: bool) -> list[object]:
    values = VALUES[kind].tolist()
    return values if binary or kind != "BYTES" else [text.decode() for text in values]


@rows("kind", KINDS)
def test_every_datatype(pair, kind):
    forms = [True] if pair.ours.is_grpc else [True, False]  # there is no JSON in gRPC
    for binary_in, binary_out in product(forms, forms):

        def call(talk: Talk, one: bool = binary_in, other: bool = binary_out) -> object:
            outputs = [talk.output(f"OUT_{kind}", binary=other)]
            return talk.infer("kinds", [given(talk, kind, binary=one)], outputs=outputs)

        found = pair.same(call)
        if kind in {"BF16", "FP16"} and not (binary_in and binary_out):
            assert found[0] == "InferenceServerException"  # nor are there these in JSON
        else:
            assert found[1][f"OUT_{kind}"][1] == received(kind, binary=binary_out)


def test_raw_bytes(pair):
    values = np.array([b"\xff\x00\xfe", b""], np.object_)

    def call(talk: Talk) -> object:
        return talk.infer("kinds", [talk.input("IN_BYTES", "BYTES", values)])

    assert pair.same(call)[1]["OUT_BYTES"][1] == [b"\xff\x00\xfe", b""]


def test_many_inputs_give_the_requested_outputs(pair):
    kinds = ["UINT8", "BYTES", "FP32", "INT64"]

    def call(talk: Talk) -> object:
        outputs = [talk.output("OUT_BYTES"), talk.output("OUT_UINT8", binary=False)]
        return talk.infer("kinds", [given(talk, kind) for kind in kinds], outputs=outputs)

    assert pair.same(call)[1].keys() == {"OUT_BYTES", "OUT_UINT8"}


@rows("binary", [True, False])
def test_classification(pair, binary):
    values = np.array([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]], np.float32)

    def call(talk: Talk) -> object:
        outputs = [talk.output("OUT", binary=binary, class_count=2)]
        return talk.infer("classes", [talk.input("IN", "FP32", values)], outputs=outputs)

    labels = np.ravel(pair.same(call)[1]["OUT"][1])
    texts = [label.decode() if isinstance(label, bytes) else label for label in labels]
    assert [text.rpartition(":")[2] for text in texts] == ["dog", "fish", "cat", "fish"]


@rows("sequence", [7, "seven"])
def test_sequences(pair, sequence):
    def call(talk: Talk) -> object:
        values = [np.array([[value]], np.float32) for value in (1, 2, 3)]
        return [
            talk.infer(
                "sums",
                [talk.input("IN", "FP32", value)],
                sequence_id=sequence,
                sequence_start=i == 0,
                sequence_end=i == 2,
            )[1]["OUT"][1]
            for i, value in enumerate(values)
        ]

    assert pair.same(call) == [[[1.0]], [[3.0]], [[6.0]]]


def one(talk: Talk) -> list[object]:
    return [talk.input("IN", "FP32", np.ones((1, 1), np.float32))]


@rows("request_id", ["", "7", "a/b c é"])
def test_the_request_id_comes_back(pair, request_id):
    if pair.ours.is_grpc or request_id.isascii():
        found = pair.same(lambda t: t.infer("queued", one(t), request_id=request_id))
        assert found[0].get("id", "") == request_id


@rows(
    "options",
    [
        {"priority": 2},
        {"timeout": 60_000_000},
        {"model_version": "1"},
        {"parameters": {"a": "b", "c": 1}},
    ],
)
def test_what_a_request_may_say_about_itself(pair, options):
    found = pair.same(lambda t: t.infer("queued", one(t), **options))
    assert found[1]["OUT"][1] == [[1.0]]


def test_a_deadline_is_the_callers(grpc_pair):
    found = grpc_pair.same(lambda t: moody(t, 3, client_timeout=0.2))
    assert found == ("InferenceServerException", "StatusCode.DEADLINE_EXCEEDED")


def moody(talk: Talk, mood: float, **options: object) -> object:
    inputs = [talk.input("IN", "FP32", np.array([mood], np.float32))]
    return talk.infer("moody", inputs, **options)


def shaped(talk: Talk, *shape: int, name: str = "IN", kind: str = "FP32") -> object:
    values = np.ones(shape, np.float32 if kind == "FP32" else np.int32)
    return talk.infer("queued", [talk.input(name, kind, values)])


FAILING = {
    "unknown-model": lambda talk: talk.infer("nobody", one(talk)),
    "wrong-datatype": lambda talk: shaped(talk, 1, 1, kind="INT32"),
    "wrong-shape": lambda talk: shaped(talk, 1, 2),
    "wrong-rank": lambda talk: shaped(talk, 1),
    "wrong-name": lambda talk: shaped(talk, 1, 1, name="X"),
    "wrong-output": lambda talk: talk.infer("queued", one(talk), outputs=[talk.output("X")]),
    "too-large-a-batch": lambda talk: shaped(talk, 2, 1),
    "no-sequence": lambda talk: talk.infer("sums", one(talk)),
    "raises": lambda talk: moody(talk, 1),
    "says-invalid": lambda talk: moody(talk, 2),
}


@rows("call", FAILING.values())
def test_errors(pair, call):
    assert pair.same(call)[0] == "InferenceServerException"


def counting(talk: Talk, count: float, **options: object) -> dict[str, object]:
    inputs = [talk.input("IN", "FP32", np.array([count], np.float32))]
    return {"model_name": "counts", "inputs": inputs, **options}


def test_a_stream_of_a_decoupled_model(grpc_pair):
    found = grpc_pair.same(lambda t: t.stream([counting(t, 3, request_id="x")], 3))
    assert [result[1]["OUT"][1] for result in found] == [[0.0], [1.0], [2.0]]


def test_final_answer_may_have_no_outputs(grpc_pair):
    answers = 2 if grpc_pair.ours.is_aio else 3  # that client cannot ask for it
    asked = {"enable_empty_final_response": True}
    found = grpc_pair.same(lambda t: t.stream([counting(t, 2, **asked)], answers))
    assert [len(result[1]) for result in found] == [1, 1, 0][:answers]


def test_an_error_within_a_stream_leaves_it_open(grpc_pair):
    def call(talk: Talk) -> object:
        return talk.stream([counting(talk, 13)], 2) + talk.stream([counting(talk, 1)], 1)

    found = grpc_pair.same(call)
    assert found[1][0] == "InferenceServerException"


def test_a_stream_of_other_models(grpc_pair):
    def call(talk: Talk) -> object:
        requests = [
            {"model_name": "queued", "inputs": one(talk), "request_id": f"{i}"} for i in range(4)
        ]
        return talk.stream(requests, 4)

    assert [result[0]["id"] for result in grpc_pair.same(call)] == ["0", "1", "2", "3"]
