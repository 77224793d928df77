"""The list of content types that a model has: what it may say, and of which models."""

import pytest

from adapter.codecs import content_types
from adapter.core.tensors import Tensor
from tests.cases import rows

IMAGE = Tensor("IMAGE", "BYTES", (1,))
ROWS = Tensor("IN", "FP32", (-1,))


def read(text, *inputs, is_batched=False):
    return content_types(text, inputs, (), is_batched=is_batched)


def test_types_are_read_whatever_their_case_and_blanks():
    found = read(" Image/* , application/PDF,image/*", IMAGE)
    assert found.types == ("image/*", "application/pdf")
    assert "image/png" in found
    assert "audio/wav" not in found


@rows(
    ("text", "tensor", "is_batched"),
    [
        ("image/png, audio/*, video/*, application/x-image, text/plain", IMAGE, False),
        ("image/*", Tensor("IN", "BYTES", (-1,)), True),
        ("application/octet-stream", IMAGE, True),
        ("application/octet-stream", Tensor("IN", "FP32", (3, -1)), True),
        ("application/x-npy", Tensor("IN", "BOOL", (3, 4, 5)), False),
        ("application/x-npy; cast", ROWS, True),
        ("application/x-npy;cast", Tensor("IN", "UINT8", (3, 4, 5)), False),
        ("text/csv", ROWS, True),
        ("text/csv", Tensor("IN", "INT64", (-1, 4)), False),
    ],
)
def test_what_fits_the_input_is_taken(text, tensor, is_batched):
    found = read(text, tensor, is_batched=is_batched)
    assert found.options == ({"cast"} if "cast" in text else set())


def test_a_refusal_names_every_type_that_there_is():
    with pytest.raises(ValueError, match="unknown content type") as raised:
        read("image/jpg;q=1", IMAGE)
    named = str(raised.value).rpartition("supported are ")[2].split(", ")
    assert {"application/x-npy", "application/x-npy;cast"} < set(named)
    kinds = {"image/*", "audio/*", "video/*", "text/plain", "application/octet-stream"}
    assert kinds < set(named)


@rows(
    ("text", "tensors", "why"),
    [
        ("", [IMAGE], "unknown content type ''; supported are image"),
        ("image/*,", [IMAGE], "unknown content type ''"),
        ("application/x-npz", [ROWS], "unknown content type 'application/x-npz'"),
        ("*/*", [ROWS], "unknown content type"),
        ("text/csv;cast", [ROWS], "unknown content type"),
        ("application/x-npy;casts", [ROWS], "unknown content type"),
        ("image/*", [], "names none"),
        ("image/*", [IMAGE, IMAGE], "names 2"),
        ("image/*", [ROWS], r"needs TYPE_STRING with dims \[1\]; input 'IN' is FP32 \[-1\]"),
        ("image/*", [Tensor("IN", "BYTES", (2,))], "needs TYPE_STRING"),
        ("application/x-npy", [IMAGE], "needs a type that NumPy has"),
        ("application/x-npy", [Tensor("IN", "BF16", (1,))], "needs a type that NumPy has"),
        ("application/x-npy;cast", [Tensor("IN", "BOOL", (1,))], "of numbers; it is BOOL"),
        ("text/csv", [ROWS], "needs two dimensions, rows and columns"),
        ("text/csv", [Tensor("IN", "BOOL", (1, 1))], "needs a type of INT8 .* is BOOL"),
        ("text/csv", [Tensor("IN", "BF16", (-1, -1))], "needs a type of INT8 .* is BF16"),
        ("text/csv", [IMAGE], "needs a type of INT8 .* is BYTES"),
        ("application/octet-stream", [Tensor("IN", "FP32", (-1, -1))], "one -1 at most"),
        ("application/octet-stream", [Tensor("IN", "BF16", (1,))], "or a type that NumPy has"),
    ],
)
def test_what_does_not_fit_is_refused_with_reason(text, tensors, why):
    with pytest.raises(ValueError, match=why.replace("*/*", r"\*/\*")):
        read(text, *tensors)
