"""The tables of headers that Triton is handed."""

import pytest

from adapter.core.triton_input import HeaderTable, choose_encoding
from adapter.errors import InvalidRequest

FLAG = "--http-header-forward-pattern"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("gzip, deflate", "gzip"),
        ("GZIP ; q=0.5, deflate;q=0.8", "deflate"),
        ("gzip;q=0.5, identity;q=0.1", "gzip"),
        ("identity, gzip", None),
        ("*, gzip", None),
        ("gzip;q=0", None),
        ("gzip;q=1e999", None),
        ("gzip;q=1e-999, deflate;q=0.001", "deflate"),
        ("gzip;q=x", None),
        ("br, zstd", None),
        ("gzip;q=1;q=1e999", None),
    ],
)
def test_accepted_encoding_is_the_one_liked_best(value, expected):
    assert choose_encoding(value) == expected


@pytest.mark.parametrize(
    ("arguments", "passes"),
    [
        ((), False),
        ((f"{FLAG}=X-T.*",), True),
        ((FLAG, "(?-i)X-T.*"), True),
        ((f"{FLAG}=X-T.*", f"{FLAG}=other"), False),
        (("--http-header-forward", "X-T.*"), False),
        ((f"{FLAG}=\\p{{Greek}}",), True),
        (None, True),
    ],
)
def test_other_headers_pass_by_the_pattern_of_triton(arguments, passes):
    """All pass where the arguments or the pattern of Triton are not understood."""
    table = HeaderTable(FLAG, arguments)
    assert table.should_pass("x-tenant") is passes
    assert table.should_pass("traceparent")
    assert not table.should_pass("authorization")


def test_headers_are_written_anew_or_dropped():
    table = HeaderTable(FLAG, ())
    written = table.rewrite(
        [
            ("accept-encoding", "deflate;q=0.1"),
            ("Accept-Encoding", "gzip;q=1e999"),
            ("Content-Encoding", " GZIP "),
            ("inference-header-content-length", "007"),
            ("traceparent", "00-1"),
            ("tracestate", "a\tb"),
            ("X-Request-Id", "\xe9"),
            ("Cookie", "a=b"),
        ]
    )
    assert dict(written) == {
        "Accept-Encoding": "deflate",
        "Content-Encoding": "gzip",
        "Inference-Header-Content-Length": "7",
        "traceparent": "00-1",
    }


@pytest.mark.parametrize("value", ["", "-1", "1e999", "9" * 16, "0x10", "1.5"])
def test_length_of_json_must_be_a_number(value):
    with pytest.raises(InvalidRequest, match="is not a number"):
        HeaderTable(FLAG, ()).rewrite([("Inference-Header-Content-Length", value)])
