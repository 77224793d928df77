"""Which calls of the endpoint are planned, and what of their heads is the same in each."""

import pytest

from adapter.frontends.http.plans import split_differing_lines
from tests.cases import rows

HEAD = (
    b"POST /endpoints/any/invocations HTTP/1.1\r\nHost: a\r\n%b"
    b"X-Amzn-SageMaker-Target-Model: m\r\nContent-Length: 2\r\n\r\n"
)
SIGNED = (
    b"X-Amz-Date: 20261122T025859Z\r\n"
    b"Authorization: AWS4-HMAC-SHA256 Credential=A/20261122/e/sagemaker/aws4_request\r\n"
    b"amz-sdk-invocation-id: 5f0c7f1d\r\namz-sdk-request: attempt=1; max=3\r\n"
)


@pytest.mark.parametrize("lines", [SIGNED, SIGNED.lower(), b"X-Amzn-Trace-Id: Root=1-2\r\n"])
def test_differing_lines_are_left_out(lines: bytes) -> None:
    assert split_differing_lines(HEAD % lines) == (HEAD % b"", [])


@rows(
    "lines",
    [
        b"X-Amz-Date: a\r\n Transfer-Encoding: chunked\r\n",
        b"X-Amz-Date: a\r\n\tb\r\n",
        b"Authorization: a\nTransfer-Encoding: chunked\r\n",
        b"Authorization: a\rb\r\n",
        b"Authorization: \x00\r\n",
        b"Authorization: \xff\r\n",
        b"X-Amz-Dates: a\r\n",
        b"Transfer-Encoding: chunked\r\n",
    ],
)
def test_a_line_that_might_be_read_differently_stays(lines: bytes) -> None:
    assert split_differing_lines(HEAD % lines) == (HEAD % lines, [])


def test_only_such_whole_lines_are_left_out() -> None:
    apart = b"X-Amz-Date: a\r\nAccept: b\r\nAuthorization: c\r\namz-sdk-request: d\r\n"
    assert split_differing_lines(HEAD % apart)[0] == HEAD % b"Accept: b\r\n"
    folded = b"Authorization: b\r\n Transfer-Encoding: chunked\r\n"
    assert split_differing_lines(HEAD % (b"X-Amz-Date: a\r\n" + folded))[0] == HEAD % folded
