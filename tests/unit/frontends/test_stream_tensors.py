"""V2 inferences of a stream of the endpoint, as JSON: what of it takes long is done in pieces."""

import json
from types import SimpleNamespace

import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.errors import InvalidRequest
from adapter.frontends.endpoint.streams import as_line, as_request

RECORD = SimpleNamespace(id="m", name="m")


def line_of(*strings: bytes) -> list[str]:
    raw = b"".join(len(each).to_bytes(4, "little") + each for each in strings)
    output = {"name": "OUT", "datatype": "BYTES", "shape": [len(strings)]}
    answer = pb.ModelInferResponse(outputs=[output], raw_output_contents=[raw])
    line = as_line(pb.ModelStreamInferResponse(infer_response=answer).SerializeToString(), RECORD)
    found: list[str] = json.loads(line)["outputs"][0]["data"]
    return found


@pytest.mark.parametrize("text", ["é", '"', "\\", "\U0001f600", "a\n"])
def test_long_strings_are_what_they_are_whole(text: str) -> None:
    for before in range(4):
        long = "x" * before + text * 100_000
        assert line_of(long.encode(), b"", b"short") == [long, "", "short"]


def test_bytes_without_text_are_escaped_in_strings() -> None:
    raw = b"\xff" + "é".encode() * 100_000 + b"\xc3"
    assert line_of(raw) == [raw.decode(errors="backslashreplace")]


@pytest.mark.parametrize("levels", [64, 300, 900])
def test_too_deeply_nested_values_are_refused(levels: int) -> None:
    data = json.loads("[" * levels + "1" + "]" * levels)
    call = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": data}]}
    with pytest.raises(InvalidRequest, match="levels"):
        as_request(call, b"", RECORD)
    call["inputs"][0]["data"] = [[[1.0]]]
    assert pb.ModelInferRequest.FromString(as_request(call, b"", RECORD)).raw_input_contents
