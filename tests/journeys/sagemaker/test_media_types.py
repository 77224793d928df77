"""Bodies that come as what they are not: curl sends all of them as a form, unless it is told."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.asking import binary_request
from tests.running import EXAMPLES, Client, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

MB = 10**6


@pytest.fixture(scope="module")
def own() -> Iterator[RunningAdapter]:
    """Of this module alone: Triton 2.51 died of what is asked here."""
    with embedded_adapter() as adapter, adapter.client() as client:
        client.load_model("echo", EXAMPLES / "identity")
        yield adapter


def numbers(size: int) -> bytes:
    """JSON of about so many bytes."""
    count = size // 4
    data = ",".join(["0.5"] * count)
    return (
        f'{{"inputs":[{{"name":"IN","datatype":"FP32","shape":[{count}],"data":[{data}]}}],'
        '"outputs":[{"name":"OUT","parameters":{"binary_data":true}}]}'
    ).encode()


def curl(address: str, path: str, body: Path, *options: str) -> tuple[int, bytes]:
    asked = subprocess.run(
        [
            *("curl", "-s", "-w", "\n%{http_code}", "--data-binary", f"@{body}", *options),
            f"http://{address}{path}",
        ],
        capture_output=True,
        check=True,
        timeout=90,
    )
    answer, _, status = asked.stdout.rpartition(b"\n")
    return int(status), answer


@pytest.mark.parametrize(
    ("path", "size", "options"),
    [
        ("/models/echo/invoke", 6 * MB, ("-H", "Transfer-Encoding: chunked")),
        ("/v2/models/echo/infer", 22 * MB, ()),
    ],
    ids=["chunked", "sized"],
)
def test_large_json_as_a_form_is_answered(own, tmp_path, path, size, options):
    body = tmp_path / "body"
    body.write_bytes(numbers(size))
    status, answer = curl(own.http, path, body, *options)
    assert (status, len(answer) > size) == (200, True), answer[:300]
    assert not own.events("triton.exited")


def test_raw_tensors_as_a_form_are_answered(own, tmp_path):
    body, length = binary_request(3 * MB)
    path = tmp_path / "body"
    path.write_bytes(body)
    header = f"Inference-Header-Content-Length: {length}"
    status, answer = curl(own.http, "/v2/models/echo/infer", path, "-H", header)
    assert (status, len(answer) > 12 * MB) == (200, True), answer[:300]
    assert not own.events("triton.exited")


@pytest.mark.parametrize("path", ["/v2/models/echo/generate", "/v2/models/echo/generate_stream"])
def test_model_ignoring_a_request_ends_nothing(own, tmp_path, path):
    body = tmp_path / "body"
    body.write_bytes(json.dumps({"IN": "x" * 6 * MB}).encode())
    status, answer = curl(own.http, path, body)
    assert 400 <= status < 500, answer[:300]
    assert not own.events("triton.exited")
    with Client(own.http) as client:
        assert client.get("/ping").status == 200
