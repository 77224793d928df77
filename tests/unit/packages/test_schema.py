"""ModelMesh's schema: what is read, what is refused, and the config that comes of it."""

import json

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from adapter.core.tensors import Tensor
from adapter.errors import InvalidModel
from adapter.packages.config_text import quoted, with_tensors
from adapter.packages.schema import Schema, merge, parse_schema, tensors_text
from tests.cases import rows


def config_for(schema: Schema, backend: str) -> str:
    return with_tensors(
        f"backend: {quoted(backend)}\n",
        tensors_text(schema.inputs),
        tensors_text(schema.outputs),
    )


def raw(**fields):
    return json.dumps(fields).encode()


def tensor(name="A", datatype="FP32", shape=(1,)):
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def refusal(junk):
    with pytest.raises(InvalidModel) as caught:
        parse_schema(junk, "s.json")
    return str(caught.value)


def parsed(text):
    return text_format.Parse(text, ModelConfig())


# --- reading


def test_the_tensors_are_read_in_order():
    found = raw(
        inputs=[tensor("B", "FP32", [3, -1]), tensor("A", "INT8", [])], outputs=[tensor("A")], x=1
    )
    assert parse_schema(found, "s") == Schema(
        (Tensor("B", "FP32", (3, -1)), Tensor("A", "INT8", ())), (Tensor("A", "FP32", (1,)),)
    )


@pytest.mark.parametrize(
    "fields", [{}, {"inputs": None}, {"inputs": [], "outputs": None}, {"name": "model"}]
)
def test_a_schema_may_say_nothing(fields):
    assert parse_schema(raw(**fields), "s") == Schema((), ())


@rows(
    ("junk", "reason"),
    [
        (b'{"inputs": [}', "s.json: it is not valid JSON: Expecting value: line 1 column 13"),
        (b'{"a": ' + b"9" * 5000 + b"}", "s.json: it is not valid JSON: "),
        (b"null", "s.json: it is not a JSON object"),
        (raw(inputs={}), "s.json: inputs is not a list"),
        (raw(inputs=[], outputs="A"), "s.json: outputs is not a list"),
        (raw(inputs=[tensor(), "A"]), "s.json: inputs[1]: it is not a JSON object"),
        (raw(inputs=[tensor(name="")]), "s.json: inputs[0]: it has no name"),
        (raw(inputs=[tensor(name=3)]), "s.json: inputs[0]: it has no name"),
        (raw(inputs=[tensor(name="\ud800")]), "s.json: inputs[0]: its name is not valid Unicode"),
        (raw(inputs=[tensor(datatype="fp32")]), 's.json: inputs[0]: datatype "fp32" is none of '),
        (raw(inputs=[tensor(datatype=[])]), "s.json: inputs[0]: datatype [] is none of BOOL,"),
        (raw(inputs=[{"name": "A"}]), "s.json: inputs[0]: datatype null is none of "),
        (raw(inputs=[{"name": "A", "datatype": "FP32"}]), "s.json: inputs[0]: shape null is not"),
        (raw(inputs=[tensor() | {"shape": 3}]), "s.json: inputs[0]: shape 3 is not a list of"),
    ],
)
def test_junk_is_refused_by_place_and_reason(junk, reason):
    assert refusal(junk).startswith(reason)


@rows("dimension", [0, -2, 1.0, True, "1", None, 2**63, float("nan")])
def test_a_dimension_is_positive_or_minus_one(dimension):
    assert "is not a list of positive whole numbers or -1" in refusal(
        raw(inputs=[tensor(shape=[1, dimension])])
    )


def test_a_refusal_is_short_however_large_the_schema():
    long = "x" * 5000
    for junk in (
        raw(inputs=[tensor(datatype=long)]),
        raw(inputs=[tensor(shape=[0] * 5000)]),
        raw(inputs=[tensor(name=long)] * 2),
    ):
        assert len(refusal(junk)) < 400


@rows(
    ("datatype", "expected"),
    [
        *((name.removeprefix("TYPE_"), name) for name, number in DataType.items() if number),
        ("BYTES", "TYPE_STRING"),
    ],
)
def test_each_datatype_has_its_type(datatype, expected):
    schema = parse_schema(raw(inputs=[tensor(datatype=datatype)]), "s")
    assert parsed(config_for(schema, "b")).input[0].data_type == DataType.Value(expected)


# --- beside a config


BATCHED = Schema(
    (Tensor("INPUT", "FP32", (-1, 64, 64)), Tensor("TYPE", "INT8", (-1, 1))),
    (Tensor("OUTPUT", "INT64", (-1, 10)),),
)


def test_without_batching_all_dimensions_stay():
    assert merge(BATCHED, 0, "c") == BATCHED


@rows(
    ("shape", "max_batch_size", "reason"),
    [
        ((10,), 100, ", but with max_batch_size 100 the first dimension must be -1"),
        ((1, -1), 1, ", but with max_batch_size 1 the first dimension must be -1"),
        ((), 100, ", but with max_batch_size 100 the first dimension must be -1"),
        ((-1,), 100, "; Triton needs a dimension besides the batch's"),
        ((), 0, "; Triton needs a dimension besides the batch's"),
    ],
)
@rows("field", ["inputs", "outputs"])
def test_shape_that_does_not_fit_config_is_conflict(shape, max_batch_size, reason, field):
    tensors = {"inputs": (), "outputs": ()} | {field: (Tensor("T", "FP32", shape),)}
    with pytest.raises(InvalidModel) as caught:
        merge(Schema(**tensors), max_batch_size, "m/config.pbtxt")
    assert str(caught.value) == (
        "m/config.pbtxt: conflicting model configuration: tensor 'T' has shape"
        f" {list(shape)}{reason}"
    )


def test_a_conflict_is_short_however_large_the_shape():
    with pytest.raises(InvalidModel) as caught:
        merge(Schema((Tensor("x" * 5000, "FP32", (1,) * 5000),), ()), 8, "c")
    assert len(str(caught.value)) < 400


# --- any schema

_TENSORS = st.lists(
    st.builds(
        tensor,
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
        st.sampled_from(["FP32", "BF16", "BYTES"]),
        st.lists(st.just(-1) | st.integers(1, 2**63 - 1), min_size=1, max_size=4),
    ),
    max_size=3,
    unique_by=lambda item: item["name"],
)


@given(_TENSORS, _TENSORS)
def test_the_config_names_the_same_tensors(inputs, outputs):
    schema = merge(parse_schema(raw(inputs=inputs, outputs=outputs), "s"), 0, "s")
    config = parsed(config_for(schema, 'b"'))
    assert config.backend == 'b"'
    for items, found in ((inputs, config.input), (outputs, config.output)):
        assert [(item["name"], item["shape"]) for item in items] == [
            (tensor.name, list(tensor.dims)) for tensor in found
        ]


@given(
    st.recursive(
        st.none() | st.integers() | st.just("A") | st.just("FP32"),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["inputs", "outputs", "name", "datatype", "shape"]), inner
            )
        ),
    )
)
def test_any_json_is_a_schema_or_refused(found):
    try:
        schema = parse_schema(json.dumps(found).encode(), "s")
    except InvalidModel:
        return
    assert isinstance(schema, Schema)
