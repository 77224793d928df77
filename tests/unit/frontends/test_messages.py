"""The model's name is read and written in the bytes as protobuf itself would."""

import random

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from adapter.errors import InvalidRequest
from adapter.frontends.grpc.messages import read_field, read_repeated, with_field
from adapter.relay.protobuf import SHORT_BYTES, has_no_outputs
from tests.cases import rows

PARAMETERS = st.dictionaries(
    st.text(max_size=8),
    st.one_of(
        st.booleans().map(lambda v: pb.InferParameter(bool_param=v)),
        st.integers(-(2**63), 2**63 - 1).map(lambda v: pb.InferParameter(int64_param=v)),
        st.floats(allow_nan=False).map(lambda v: pb.InferParameter(double_param=v)),
        st.text(max_size=300).map(lambda v: pb.InferParameter(string_param=v)),
    ),
    max_size=4,
)
REQUESTS = st.builds(
    pb.ModelInferRequest,
    model_name=st.text(max_size=200),
    model_version=st.text(max_size=3),
    id=st.text(max_size=200),
    parameters=PARAMETERS,
    inputs=st.lists(
        st.builds(
            pb.ModelInferRequest.InferInputTensor,
            name=st.text(max_size=9),
            datatype=st.sampled_from(["FP32", "BYTES"]),
            shape=st.lists(st.integers(-1, 2**40), max_size=3),
            parameters=PARAMETERS,
        ),
        max_size=3,
    ),
    raw_input_contents=st.lists(st.binary(max_size=400), max_size=3),
)


ANSWERS = st.builds(
    pb.ModelInferResponse,
    model_name=st.text(max_size=60),
    model_version=st.text(max_size=3),
    id=st.text(max_size=40),
    outputs=st.lists(
        st.builds(
            pb.ModelInferResponse.InferOutputTensor,
            name=st.text(max_size=9),
            datatype=st.just("FP32"),
            shape=st.lists(st.integers(0, 9), max_size=2),
        ),
        max_size=2,
    ),
)


@given(ANSWERS)
def test_short_empty_answer_is_recognized(answer):
    raw = answer.SerializeToString()
    if len(raw) < SHORT_BYTES:
        assert has_no_outputs(raw) is (len(answer.outputs) == 0)
        assert has_no_outputs(memoryview(b"12345" + raw), 5) is has_no_outputs(raw)


@pytest.mark.parametrize("raw", [b"\x0a", b"\x0a\x02m", b"\x12\x7f", b"\x08\x01", b"\x0a\x01m\x12"])
def test_partial_answer_is_not_empty(raw):
    assert not has_no_outputs(raw)


def name_in(message: bytes) -> str:
    return (read_field(message, 1) or b"").decode()


@given(REQUESTS, st.text(max_size=300))
def test_name_is_replaced_as_protobuf_does(request, name):
    raw = request.SerializeToString()
    assert name_in(raw) == request.model_name
    renamed = pb.ModelInferRequest.FromString(with_field(raw, 1, name.encode()))
    request.model_name = name
    assert renamed == request


@given(st.lists(REQUESTS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_last_of_several_fields_counts_in_any_order(requests, shuffled: random.Random):
    pieces = [
        type(request)(**{field.name: value}).SerializeToString()
        for request in requests
        for field, value in request.ListFields()
        if not field.is_repeated
    ]
    shuffled.shuffle(pieces)
    raw = b"".join(pieces)
    assert name_in(raw) == pb.ModelInferRequest.FromString(raw).model_name
    assert pb.ModelInferRequest.FromString(with_field(raw, 1, b"new")).model_name == "new"


@given(st.lists(st.binary(max_size=12), max_size=6))
def test_what_protobuf_takes_is_never_read_otherwise(pieces):
    raw = b"\x0a\x01m" + b"".join(pieces)
    try:
        name = read_field(raw, 1)
        parsed = pb.ModelInferRequest.FromString(raw)
    except (InvalidRequest, DecodeError):
        return
    assert (name or b"").decode() == parsed.model_name


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_all_of_a_repeated_field_are_read(contents):
    raw = pb.ModelInferRequest(model_name="m", raw_input_contents=contents).SerializeToString()
    assert read_repeated(raw, 7) == contents


@rows(
    ("raw", "words"),
    [
        (b"\x0a\x05abc", "breaks off"),
        (b"\x0a", "breaks off"),
        (b"\x0d\x00\x00", "breaks off"),
        (b"\x0a\x80", "breaks off"),
        (b"\x80" * 11, "endless number"),
        (b"\x0b\x0c", "tag 11"),  # a group, which may hold anything
        (b"\x02\x00", "tag 2"),  # field 0
        # a parser that keeps 32 bits of it takes this for field 1
        (b"\x0a\x01a\x8a\x80\x80\x80\x10\x01b", "tag 4294967306"),
    ],
)
def test_what_is_no_message_is_refused(raw, words):
    with pytest.raises(InvalidRequest, match=words):
        read_field(raw, 1)


def test_name_in_longer_form_of_same_tag_counts():
    raw = b"\x0a\x01a" + b"\x8a\x00\x01b"
    assert pb.ModelInferRequest.FromString(raw).model_name == "b"
    assert read_field(raw, 1) == b"b"
    assert pb.ModelInferRequest.FromString(with_field(raw, 1, b"c")).model_name == "c"


def test_tiny_fields_are_refused_before_costing_seconds():
    with pytest.raises(InvalidRequest, match="more than 16384 fields"):
        read_field(b"\x78\x00" * 10_000_000, 1)
