"""Send bodies of which a Triton dies: they are refused, and it answers the next one.

More of them, at random: tests/nightly/test_triton_input.py.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.running import COMPLETE, EXAMPLES, RunningAdapter, embedded_adapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton

MODEL = "identity"
PATHS = (
    f"/models/{MODEL}/invoke",
    f"/v2/models/{MODEL}/generate",
    f"/v2/models/{MODEL}/generate_stream",
    f"/v2/models/{MODEL}/infer",
    f"/v2/models/{MODEL}/versions/1/infer",
)


@pytest.fixture(scope="module")
def own() -> Iterator[RunningAdapter]:
    """Of this module alone: it may be the one that ends its Triton."""
    with embedded_adapter(COMPLETE) as adapter:
        with closing(adapter.client()) as client:
            assert client.load(MODEL, EXAMPLES / MODEL).status == 200
        yield adapter


def check_refused(adapter: RunningAdapter, path: str, bodies: list[Any], **headers: str) -> None:
    """Triton does not see any of the bodies, and answers the next request."""
    with closing(adapter.client()) as client:
        for body in bodies:
            reply = client.post(path, body, headers)
            assert (reply.status, reply.json()["code"]) == (400, "InvalidRequest")
        assert client.post(PATHS[0], infer_body(1.0)).status == 200
    assert not adapter.events("triton.exited")


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}], ids=["plain", "packed"])
@pytest.mark.parametrize("path", PATHS)
def test_json_deep_enough_to_kill_triton_is_refused(own, path, headers) -> None:
    deep = b"[" * 300_000
    bodies = [deep, b'{"inputs":' + deep + b"]" * 300_000 + b"}", b'{"a":' * 300_000]
    if headers:
        bodies = [gzip.compress(body) for body in bodies]
    check_refused(own, path, bodies, **headers)


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_unread_json_length_hides_no_levels(own, verb) -> None:
    bodies = [b"[" * 200_000, b"[" * 1_000_000, iter([b"[" * 300_000])]
    hidden = {"Inference-Header-Content-Length": "0"}
    check_refused(own, f"/v2/models/{MODEL}/{verb}", bodies, **hidden)


@pytest.mark.parametrize("shape", [[2**33], [2**40], [2**62], [65536, 65536]])
def test_shape_beyond_tritons_memory_is_refused(own, shape) -> None:
    tensor = {"name": "IN", "datatype": "FP32", "shape": shape, "data": [1]}
    text = json.dumps({"inputs": [tensor]}).replace("shape", "sh\\u0061pe").encode()
    check_refused(own, f"/v2/models/{MODEL}/infer", [{"inputs": [tensor]}, text, iter([text])])
