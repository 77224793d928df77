"""What a body is by its Content-Type, and what its answer is to be by Accept."""

import pytest

from adapter.codecs import content_types
from adapter.codecs.base import Source
from adapter.codecs.csv import Csv
from adapter.codecs.npy import Npy
from adapter.codecs.raw import Octets, Raw
from adapter.core.tensors import Tensor
from adapter.errors import InvalidRequest, NotAcceptable, NotJson, UnsupportedMediaType
from adapter.frontends.http import binary
from adapter.frontends.http.content_types import (
    answer_type,
    as_request,
    codec_for,
    explained,
    is_typed,
)
from tests.cases import rows

JSON, NPY, CSV, RAW, TEXT = (
    *("application/json", "application/x-npy", "text/csv", "application/octet-stream"),
    "text/plain",
)
NUMBERS = content_types(
    "application/x-npy, text/csv",
    (Tensor("IN", "FP32", (-1,)),),
    (Tensor("OUT", "FP32", (-1,)),),
    is_batched=True,
)
IMAGES = content_types(
    "image/*, application/octet-stream",
    (Tensor("IN", "BYTES", (1,)),),
    (Tensor("OUT", "BYTES", (1,)), Tensor("MORE", "FP32", (1,))),
    is_batched=False,
)


@pytest.mark.parametrize(
    ("given", "types", "kind"),
    [
        ("", NUMBERS, None),
        ("Application/JSON; charset=utf-8", NUMBERS, None),
        (f"{binary.MEDIA_TYPE};json-header-size=3", NUMBERS, None),
        ("application/octet-stream", NUMBERS, Octets),
        ("application/octet-stream", IMAGES, Octets),
        ("application/x-npy", NUMBERS, Npy),
        ("Text/CSV; charset=utf-8", NUMBERS, Csv),
        ("image/jpeg", IMAGES, Raw),
    ],
)
def test_a_body_is_what_its_type_says(given, types, kind):
    codec = codec_for(given, types, is_packed=False)
    assert (None if codec is None else type(codec)) is kind


@rows(
    ("accept", "told"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("text/*", CSV),
        (NPY, NPY),
        ("Application/X-NPY", NPY),
        (f"{CSV}, {NPY}", CSV),
        (f"{CSV};q=0.5, {NPY}", NPY),
        (f"{CSV};q=0.5, {NPY};q=0.4, text/html", CSV),
        (f"*/*, {JSON};q=0", binary.MEDIA_TYPE),
        (f"text/html, {RAW};q=0.1", RAW),
        ("text/html, application/xhtml+xml, */*;q=0.8", JSON),
        (f"{binary.MEDIA_TYPE};json-header-size=1", binary.MEDIA_TYPE),
        (f"nonsense, {NPY};q=nonsense, {CSV};q=0.001", CSV),
        ("text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2", JSON),  # Java 8's URLConnection
        (f"{CSV};q=.1, {NPY};q=.25, {JSON};q=0.", NPY),
    ],
)
def test_best_of_types_that_caller_accepts_is_told(accept, told):
    assert answer_type(accept, NUMBERS, is_choosing=False) == told


async def test_refused_body_is_told_with_its_type():
    codec = codec_for(CSV, NUMBERS, is_packed=False)
    with pytest.raises(InvalidRequest, match=r"^text/csv: row 1: 'a' is not a valid FP32"):
        await as_request(codec, Source(b"a"), 1, NUMBERS, JSON)


def test_refused_type_says_which_q_allows_it():
    with pytest.raises(NotAcceptable, match="by a q above 0 and up to 1"):
        answer_type(f"{CSV};q=1.5", NUMBERS, is_choosing=False)


@pytest.mark.parametrize(
    ("datatype", "dims", "is_batched", "also"),
    [
        ("FP32", (), True, {NPY, RAW, CSV}),
        ("FP32", (-1,), True, {NPY, RAW, CSV}),
        ("FP32", (4, -1), True, {NPY, RAW}),  # rows, columns and something else
        ("INT64", (4, -1), False, {NPY, RAW, CSV}),
        ("BF16", (4, -1), False, {RAW}),
        ("BYTES", (1,), True, {RAW, TEXT}),
        ("BYTES", (2,), False, set()),
    ],
)
def test_only_what_the_output_can_be_is_offered(datatype, dims, is_batched, also):
    given, output = Tensor("IN", "FP32", (-1,)), Tensor("OUT", datatype, dims)
    types = content_types(NPY, (given,), (output,), is_batched=is_batched)
    for media_type in (NPY, RAW, CSV):
        accept = f"{media_type}, {JSON};q=0.5"
        expected = media_type if media_type in also else JSON
        assert answer_type(accept, types, is_choosing=False) == expected
    with pytest.raises(NotAcceptable) as raised:
        answer_type("text/html", types, is_choosing=False)
    named = str(raised.value).rpartition(": ")[2].split(", ")
    assert set(named) == also | {JSON, binary.MEDIA_TYPE}


BROKEN = NotJson("failed to parse", model_id="m")


@pytest.mark.parametrize("given", ["", JSON, "application/x-www-form-urlencoded", "text/html"])
def test_plain_bad_json_says_no_more(given):
    """Nothing else could have been meant."""
    assert explained(BROKEN, {"Content-Type": given}, None) is BROKEN
    other = InvalidRequest("expected 1 inputs")
    assert explained(other, {"Content-Type": CSV}, None) is other


def test_compressed_bytes_without_json_are_unsupported_type():
    found = explained(BROKEN, {"Content-Type": RAW}, IMAGES)
    assert isinstance(found, UnsupportedMediaType)
    assert found.accepted == f"{JSON}, {binary.MEDIA_TYPE}, image/*, {RAW}"


@pytest.mark.parametrize(
    ("content_type", "accept"),
    [("", ""), (JSON, "*/*"), ("application/json;charset=utf-8", JSON), (binary.MEDIA_TYPE, "")],
)
def test_v2_for_who_accepts_anything_is_nothing_special(content_type, accept):
    assert not is_typed(content_type, accept)
    assert is_typed("text/csv", accept)
    assert is_typed(content_type, "text/csv")
