"""JSON of callers, in control calls."""

import json

import pytest

from adapter.errors import InvalidRequest
from adapter.frontends.bodies import json_object, parsed
from tests.cases import rows


@rows("piece", ["{},", "[],", "1,", "[", "{"])
@rows("kind", [str, str.encode])
def test_too_many_parts_are_refused_unparsed(piece, kind):
    with pytest.raises(InvalidRequest, match="100000"):
        parsed(kind("[" + piece * 100_001), "the body")


def test_a_large_file_in_base64_has_no_parts():
    body = {"parameters": {"config": "{}", "file:1/model.py": "QUJD" * 2**20}}
    assert json_object(json.dumps(body), "the body") == body


@pytest.mark.parametrize("text", ["", "{", "[" * 5000, b"\xff", "nul", "9" * 5000])
def test_what_is_no_json_is_an_invalid_request(text):
    with pytest.raises(InvalidRequest, match="the body is not JSON"):
        parsed(text, "the body")


def test_another_value_is_no_object():
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        json_object("[]", "the body")
