"""A content type is a class in the list of codecs, and nothing else names it."""

import json
import struct

import pytest

from adapter.codecs import CODECS, content_types
from adapter.codecs.base import Codec, Source, Values
from adapter.core.tensors import Tensor
from adapter.errors import InvalidRequest, NotAcceptable, UnsupportedMediaType
from adapter.frontends.http.content_types import answer_type, as_answer, as_request, codec_for

BIG = "application/x-big-endian"


class BigEndian(Codec):
    """A vector of FP32, the most significant byte first."""

    media_type = BIG
    listed = (BIG,)
    holds_whole_body = True

    def needed(self, types):
        return None if types.input.datatype == "FP32" else "FP32"

    async def decode(self, source, length, types):
        body = await source.whole(2**20)
        if len(body) % 4:
            raise ValueError(f"{len(body)} bytes are no vector")
        return Values(Source(swapped(body)), 0, len(body), shape=(len(body) // 4,))

    def can_answer(self, output, *, is_batched):
        return output.datatype == "FP32"

    async def encode(self, datatype, shape, values):
        if datatype != "FP32":
            raise ValueError(f"it is {datatype}")
        raw = await values.source.whole(values.skip + values.size)
        return Values(Source(swapped(raw[values.skip :])), 0, values.size)


def swapped(raw):
    return struct.pack(f">{len(raw) // 4}f", *struct.unpack(f"<{len(raw) // 4}f", raw))


class Answer:
    """An answer of Triton's with one tensor of raw bytes behind its JSON."""

    def __init__(self, datatype, raw):
        tensor = {"name": "OUT", "datatype": datatype, "shape": [len(raw) // 4]}
        tensor["parameters"] = {"binary_data_size": len(raw)}
        head = json.dumps({"outputs": [tensor]}).encode()
        self._body, self.json_header_bytes = head + raw, len(head)
        self.content_length = len(self._body)

    async def read(self):
        return self._body


@pytest.fixture
def types():
    CODECS.append(BigEndian())
    try:
        vector = Tensor("IN", "FP32", (-1,)), Tensor("OUT", "FP32", (-1,))
        yield content_types(BIG, vector[:1], vector[1:], is_batched=False)
    finally:
        CODECS.pop()


async def request(types, body):
    codec = codec_for(BIG, types, is_packed=False)
    return await as_request(codec, Source(body), len(body), types, BIG)


async def test_a_codec_in_the_list_reads_bodies(types):
    found = await request(types, struct.pack(">2f", 1, 2))

    size = int(found.headers["Inference-Header-Content-Length"])
    assert json.loads(found.body[:size])["inputs"][0]["shape"] == [2]
    assert found.body[size:] == struct.pack("<2f", 1, 2)


async def test_a_codec_in_the_list_writes_answers(types):
    assert answer_type(BIG, types, is_choosing=False) == BIG

    found = await as_answer(Answer("FP32", struct.pack("<2f", 1, 2)), BIG)

    assert found.headers == {"Content-Type": BIG, "Content-Length": "8"}
    assert found.body == struct.pack(">2f", 1, 2)


async def test_what_codec_refuses_is_told_with_its_type(types):
    with pytest.raises(InvalidRequest, match=f"^{BIG}: 3 bytes are no vector"):
        await request(types, b"123")
    with pytest.raises(NotAcceptable, match=f"output 'OUT' cannot be {BIG}: it is INT32"):
        await as_answer(Answer("INT32", bytes(8)), BIG)


def test_unlisted_type_is_no_models(types):
    CODECS.pop()
    try:
        with pytest.raises(UnsupportedMediaType):
            codec_for(BIG, types, is_packed=False)
        with pytest.raises(ValueError, match="unknown content type"):
            content_types(BIG, (types.input,), (), is_batched=False)
    finally:
        CODECS.append(BigEndian())


def test_model_of_other_input_cannot_list_type(types):
    with pytest.raises(ValueError, match=f"{BIG} needs FP32; input 'IN' is INT8"):
        content_types(BIG, (Tensor("IN", "INT8", (1,)),), (), is_batched=False)
