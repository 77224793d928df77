"""SageMaker's media type for raw tensors, and the model's name in Triton's answer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.frontends.http.binary import content_type, json_header_bytes, put_name_back

TYPE = "application/vnd.sagemaker-triton.binary+json"


@pytest.mark.parametrize(
    "text",
    ["", "application/json", "application/octet-stream", "text/csv; json-header-size=5", "*/*"],
)
def test_every_other_type_means_plain_json(text):
    assert json_header_bytes(text, 100) is None


def test_a_body_of_unknown_length_bounds_nothing():
    assert json_header_bytes(f"{TYPE};json-header-size=101", None) == 101


def test_raw_answer_states_its_json_length():
    assert content_type(None) == "application/json"
    assert content_type(12) == f"{TYPE};json-header-size=12"
    assert json_header_bytes(content_type(12), 100) == 12


def body_of(name: str, **more: object) -> bytes:
    return json.dumps(
        {"model_name": name, "model_version": "1", **more}, separators=(",", ":")
    ).encode()


def test_the_callers_name_replaces_tritons():
    changed, size = put_name_back(body_of("ta.u.a_20b"), None, "ta.u.a_20b", "a b")
    assert (changed, size) == (body_of("a b"), None)


def test_raw_tensors_stay_when_json_changes():
    header = body_of("ta.u.a_20b")
    tensors = b'\x00\xff"model_name":"ta.u.a_20b"'
    changed, size = put_name_back(header + tensors, len(header), "ta.u.a_20b", "a b")
    assert changed == body_of("a b") + tensors
    assert size == len(body_of("a b"))


def test_answer_without_model_name_stays():
    assert put_name_back(b'{"error":"x"}', None, "ta.u.a_20b", "a b") == (b'{"error":"x"}', None)
    assert put_name_back(b"", 0, "t", "a b") == (b"", 0)


@given(st.text(), st.text())
def test_text_output_that_quotes_answer_is_left_alone(name, text):
    """Whatever the model puts out: only the member itself changes."""
    quoted = text + '"model_name":"T",'
    raw = body_of("T", id=quoted, outputs=[{"name": "OUT", "data": [quoted]}])
    answer = json.loads(put_name_back(raw, None, "T", name)[0])
    expected = json.loads(raw)
    expected["model_name"] = name
    assert answer == expected


def test_an_id_before_the_name_is_left_alone():
    """Triton writes the request's id first."""
    raw = b'{"id":"\\"model_name\\":\\"T\\"","model_name":"T"}'
    assert json.loads(put_name_back(raw, None, "T", "n")[0]) == {
        "id": '"model_name":"T"',
        "model_name": "n",
    }
