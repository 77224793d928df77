"""Bodies and headers of all kinds, of which a Triton might die: it lives, and answers the next one.

Seeded; NIGHTLY_SEED plays another seed. For minutes: tests/nightly/test_triton_input.py.
"""

import asyncio
import gzip
import json
import os
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.running import COMPLETE, EXAMPLES, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

SEED = int(os.environ.get("NIGHTLY_SEED", "1"))
REQUESTS = 25
SECONDS = 40  # for one answer
MODEL = "identity"
PATHS = (
    *(f"/models/{MODEL}/invoke", f"/v2/models/{MODEL}/infer", f"/v2/models/{MODEL}/infer"),
    *(f"/v2/models/{MODEL}/versions/1/infer", f"/v2/models/{MODEL}/generate"),
    f"/v2/models/{MODEL}/generate_stream",
)
NUMBERS = (0, 1, -1, 2, 7, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 1.5, 1e308, "1", None)
DATATYPES = ("FP32", "FP32", "FP16", "BF16", "BYTES", "INT64", "BOOL", "UINT8", "x", "", None, 3)
MEDIA_TYPES = (
    *("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain"),
    *("application/json", "application/json; charset=utf-16", "application/octet-stream", ";"),
    *("application/vnd.sagemaker-triton.binary+json;json-header-size=10", "a/b" * 1000),
)
HEADERS = (
    *(
        "Accept: */*",
        "Accept-Encoding: gzip",
        "Accept-Encoding: deflate, br;q=0",
        "Range: bytes=0-1",
    ),
    *(
        "If-None-Match: *",
        "Upgrade: h2c",
        "Connection: upgrade, x-a",
        "TE: trailers",
        "Cookie: a=b",
    ),
    *(
        "Expect: x",
        "X-A: " + "y" * 8000,
        "Authorization: Basic x",
        "Forwarded: for=x",
        "Via: 1.0 a",
    ),
    *(
        "triton-grpc-protocol: x",
        "X-HTTP-Method-Override: DELETE",
        "Content-MD5: x",
        "Origin: null",
    ),
    *("Content-Disposition: form-data", "Content-Language: x", "Content-Location: /", "Date: x"),
)


class Kinds:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def request(self) -> bytes:
        body = self._body()
        lines = [f"POST {self._chance.choice(PATHS)} HTTP/1.1", "Host: localhost"]
        if self._rarely():
            lines += self._chance.sample(HEADERS, self._chance.randint(1, 4))
        if self._chance.random() < 0.8:
            lines.append(f"Content-Type: {self._chance.choice(MEDIA_TYPES)}")
        if self._rarely():
            length = self._chance.choice((0, 1, -1, len(body), len(body) + 1, 2**31, 2**63, "x"))
            lines.append(f"Inference-Header-Content-Length: {length}")
        body, coding = self._coded(body)
        lines += [f"Content-Encoding: {coding}"] if coding else []
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "\r\n"]).encode() + body

    def _rarely(self) -> bool:
        return self._chance.random() < 0.3

    def _coded(self, body: bytes) -> tuple[bytes, str]:
        kind = self._chance.choice(("", "", "", "", "gzip", "deflate", "wrong", "short", "bomb"))
        match kind:
            case "gzip":
                return gzip.compress(body, 1), kind
            case "deflate":
                return zlib.compress(body, 1), kind
            case "wrong":
                return body, self._chance.choice(("gzip", "deflate", "identity", "br", "x", ""))
            case "short":
                return gzip.compress(body, 1)[: self._chance.randint(0, 40)], "gzip"
            case "bomb":
                return gzip.compress(bytes(2**25), 9), "gzip"
        return body, ""

    def _body(self) -> bytes:
        kind = self._chance.choice(("tensor", "tensor", "tensor", "large", "deep", "raw", "noise"))
        match kind:
            case "large":
                count = self._chance.randrange(10**6, 3 * 10**6)
                return json.dumps({"inputs": [self._tensor([0.5] * count, [count])]}).encode()
            case "deep":
                depth = 10 ** self._chance.randint(1, 6)
                opens, closes = self._chance.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"[", b"")))
                deep = opens * depth + b"1" + closes * depth
                at = self._chance.choice((b'{"inputs":%s}', b'{"parameters":{"a":%s}}', b"%s"))
                whole = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":%s}]}'
                return self._chance.choice((at, whole)) % deep
            case "raw":
                return bytes(self._chance.randrange(5 * 10**6, 10**7))
            case "noise":
                return self._chance.randbytes(self._chance.randrange(3000))
        tensors = [self._any_tensor() for _ in range(self._chance.choice((0, 1, 1, 1, 2, 50)))]
        found = {"inputs": tensors} | ({"id": self._any()} if self._rarely() else {})
        if self._rarely():
            found["outputs"] = [
                {"name": self._chance.choice(("OUT", "x")), "parameters": self._parameters()}
            ]
        if self._rarely():
            found["parameters"] = self._parameters()
        text = json.dumps(found).encode()
        return text + bytes(self._chance.choice((0, 0, 0, 4, 1000)))

    def _tensor(self, data: object, shape: object) -> dict[str, object]:
        return {"name": "IN", "datatype": "FP32", "shape": shape, "data": data}

    def _any_tensor(self) -> dict[str, object]:
        choice = self._chance.choice
        shape = choice(([1], [2], [], [0], [-1], [self._any()], [choice(NUMBERS)] * 2, self._any()))
        tensor = self._tensor(
            choice(([1.0], [], [[1.0]], ["x"], "x", {}, [None], self._any())), shape
        )
        tensor["name"] = choice(("IN", "IN", "IN", "", "x" * 10**5, "\0", 1))
        tensor["datatype"] = choice(DATATYPES)
        if self._rarely():
            tensor["parameters"] = self._parameters()
        if self._rarely():
            del tensor[choice(list(tensor))]
        return tensor

    def _parameters(self) -> dict[str, object]:
        names = (
            *(
                "binary_data_size",
                "binary_data",
                "binary_data_output",
                "classification",
                "priority",
            ),
            *("sequence_id", "sequence_start", "timeout", "shared_memory_region", "x" * 1000),
            *(
                "shared_memory_byte_size",
                "shared_memory_offset",
                "triton_enable_empty_final_response",
            ),
        )
        return {
            name: self._any() for name in self._chance.sample(names, self._chance.randint(1, 4))
        }

    def _any(self) -> object:
        return self._chance.choice((*NUMBERS, True, [], {}, "x", "\ud800", [1, "a"], {"a": {}}))


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


async def play(adapter: RunningAdapter, seed: int, requests: Iterator[int]) -> Counter[str]:
    kinds, seen = Kinds(random.Random(seed)), Counter()
    for number in requests:
        asked = kinds.request()
        async with asyncio.timeout(SECONDS):
            seen[await ask(adapter.http, asked)] += 1
            after = await ask(adapter.http, honest())
        ends = adapter.events("triton.exited")
        assert (after, ends) == ("200", []), f"request {number} of seed {seed}: {asked[:2000]!r}"
    return seen


@pytest.fixture(scope="module")
def own() -> Iterator[RunningAdapter]:
    """Of this module alone: it may be the one that ends its Triton."""
    with embedded_adapter(COMPLETE) as adapter:
        with closing(adapter.client()) as client:
            assert client.load(MODEL, EXAMPLES / MODEL).status == 200
        yield adapter


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}], ids=["plain", "packed"])
@pytest.mark.parametrize("path", sorted(set(PATHS)))
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


def test_whatever_a_body_is_triton_answers_the_next_one(own) -> None:
    sys.stdout.write(f"seed {SEED}\n")
    seen = asyncio.run(play(own, SEED, iter(range(REQUESTS))))
    sys.stdout.write(f"{dict(seen)}\n")
    assert seen["200"]
    assert seen["400"]
