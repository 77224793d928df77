"""Send bodies of which a Triton dies: they are refused, and it answers the next one.

More of them, at random: tests/nightly/test_triton_input.py.
"""

import asyncio
import gzip
import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.running import COMPLETE, EXAMPLES, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

MODEL = "identity"
PATHS = (
    f"/models/{MODEL}/invoke",
    f"/v2/models/{MODEL}/generate",
    f"/v2/models/{MODEL}/generate_stream",
    f"/v2/models/{MODEL}/infer",
    f"/v2/models/{MODEL}/versions/1/infer",
)


async def ask(address: str, data: bytes) -> str:
    """The status; "closed" where the connection ends without one."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    try:
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        writer.transport.abort()
    return head.split()[1].decode()


def honest() -> bytes:
    body = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}]}'
    first = f"POST /models/{MODEL}/invoke HTTP/1.1\r\nHost: localhost\r\n"
    head = f"{first}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture(scope="module")
def own() -> Iterator[RunningAdapter]:
    """Of this module alone: it may be the one that ends its Triton."""
    with embedded_adapter(COMPLETE) as adapter:
        with closing(adapter.client()) as client:
            assert client.load(MODEL, EXAMPLES / MODEL).status == 200
        yield adapter


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}], ids=["plain", "packed"])
@pytest.mark.parametrize("path", PATHS)
def test_json_of_so_many_levels_that_triton_dies_of_it_is_refused(own, path, headers) -> None:
    deep = b"[" * 300_000
    with closing(own.client()) as client:
        for body in (deep, b'{"inputs":' + deep + b"]" * 300_000 + b"}", b'{"a":' * 300_000):
            packed = gzip.compress(body) if headers else body
            reply = client.post(path, packed, headers)
            assert (reply.status, reply.json()["code"]) == (400, "InvalidRequest")
    assert asyncio.run(ask(own.http, honest())) == "200"
    assert not own.events("triton.exited")


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_unread_json_length_hides_no_levels(own, verb) -> None:
    hidden = {"Inference-Header-Content-Length": "0"}
    with closing(own.client()) as client:
        for body in (b"[" * 200_000, b"[" * 1_000_000, (each for each in [b"[" * 300_000])):
            reply = client.post(f"/v2/models/{MODEL}/{verb}", body, hidden)
            assert (reply.status, reply.json()["code"]) == (400, "InvalidRequest")
    assert asyncio.run(ask(own.http, honest())) == "200"
    assert not own.events("triton.exited")


@pytest.mark.parametrize("shape", [[2**33], [2**40], [2**62], [65536, 65536]])
def test_a_shape_that_triton_has_no_memory_for_is_refused(own, shape) -> None:
    tensor = {"name": "IN", "datatype": "FP32", "shape": shape, "data": [1]}
    text = json.dumps({"inputs": [tensor]}).replace("shape", "sh\\u0061pe")
    with closing(own.client()) as client:
        for body in ({"inputs": [tensor]}, text.encode(), (each for each in [text.encode()])):
            reply = client.post(f"/v2/models/{MODEL}/infer", body)
            assert (reply.status, reply.json()["code"]) == (400, "InvalidRequest")
    assert asyncio.run(ask(own.http, honest())) == "200"
    assert not own.events("triton.exited")
