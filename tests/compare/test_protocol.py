"""The binary media type, error answers, and the requests that end Triton 2.51."""

import gzip
import json
import struct
from collections.abc import Iterator

import pytest

from tests.compare.servers import Endpoint, error_of, on_both
from tests.running import Reply
from tests.trees import infer_body

pytestmark = [pytest.mark.triton, pytest.mark.builtin, pytest.mark.nightly]

MEDIA_TYPE = "application/vnd.sagemaker-triton.binary+json"


def binary_body(*values: float) -> tuple[bytes, int]:
    """Header and raw tensor in one, and how long the header is."""
    raw = struct.pack(f"<{len(values)}f", *values)
    tensor = {"name": "IN", "datatype": "FP32", "shape": [len(values)]}
    tensor["parameters"] = {"binary_data_size": len(raw)}
    output = {"name": "OUT", "parameters": {"binary_data": True}}
    header = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    return header + raw, len(header)


def tensor_of(reply: Reply) -> tuple[float, ...]:
    """The raw tensor behind the JSON of a binary answer."""
    kind, _, size = reply.headers["Content-Type"].partition(";json-header-size=")
    assert kind == MEDIA_TYPE
    header, raw = reply.body[: int(size)], reply.body[int(size) :]
    assert json.loads(header)["model_name"] == "x"
    return struct.unpack(f"<{len(raw) // 4}f", raw)


class TestTheBinaryMediaType:
    @pytest.fixture
    def loaded(self, endpoint: Endpoint) -> Endpoint:
        endpoint.put("x", endpoint.model())
        return endpoint

    @on_both("understands one spelling")
    def test_spaces_and_case_are_free(self, loaded: Endpoint) -> None:
        body, size = binary_body(1.5, -2.0)
        for content_type in (
            f"{MEDIA_TYPE};json-header-size={size}",
            f"{MEDIA_TYPE}; json-header-size={size}",
            f"{MEDIA_TYPE.upper()};json-header-size={size}",
            f"{MEDIA_TYPE};JSON-Header-Size={size}",
        ):
            reply = loaded.invoke("x", body, {"Content-Type": content_type})

            assert reply.status == 200, content_type
            assert tensor_of(reply) == (1.5, -2.0)

    @on_both("takes it for 0, which is a raw tensor")
    def test_a_size_that_is_no_number_is_refused(self, loaded: Endpoint) -> None:
        headers = {"Content-Type": f"{MEDIA_TYPE};json-header-size=abc"}

        assert loaded.invoke("x", struct.pack("<2f", 1.5, -2.0), headers).status == 400


class TestErrors:
    """JSON that says it is JSON, and a status that says whose fault it is."""

    @on_both("no body")
    @pytest.mark.parametrize(
        ("method", "path"),
        [("GET", "/models/no"), ("DELETE", "/models/no"), ("POST", "/models/no/invoke")],
        ids=["get", "unload", "invoke"],
    )
    def test_what_is_not_loaded_is_not_found_and_named(
        self, endpoint: Endpoint, method: str, path: str
    ) -> None:
        reply = endpoint.request(method, path, infer_body(1.0) if method == "POST" else None)

        assert reply.status == 404
        assert "'no'" in error_of(reply)

    @on_both("text/plain")
    def test_a_conflict_is_json(self, endpoint: Endpoint) -> None:
        url = endpoint.model()
        endpoint.put("x", url)

        reply = endpoint.load("x", url)

        assert reply.status == 409
        assert "'x'" in error_of(reply)

    @on_both("text/plain")
    def test_a_failed_load_is_json_with_the_words_of_the_model(self, endpoint: Endpoint) -> None:
        reply = endpoint.load("x", endpoint.model(initialize="raise ValueError('no weights')"))

        assert reply.status == 400
        assert "no weights" in error_of(reply)

    @on_both("400, or 405 without a body")
    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("PUT", "/models", "GET, HEAD, POST"),
            ("POST", "/ping", "GET, HEAD"),
        ],
    )
    def test_a_wrong_method_is_told_the_right_ones(
        self, endpoint: Endpoint, method: str, path: str, allowed: str
    ) -> None:
        reply = endpoint.request(method, path)

        assert reply.status == 405
        assert reply.headers["Allow"] == allowed
        assert error_of(reply)

    @on_both("400, as if the caller could mend it")
    def test_a_model_that_raises_is_the_fault_of_the_server(self, endpoint: Endpoint) -> None:
        endpoint.put("x", endpoint.model(answer="raise RuntimeError('broken weights')"))

        reply = endpoint.invoke("x")

        assert reply.status == 500
        assert "broken weights" in error_of(reply)

    @on_both("understands no compression")
    def test_a_compressed_body_is_understood(self, endpoint: Endpoint) -> None:
        endpoint.put("x", endpoint.model())
        body = gzip.compress(json.dumps(infer_body(1.5)).encode())

        assert endpoint.invoke("x", body, {"Content-Encoding": "gzip"}).status == 200


class TestABadLoadIsRefusedAndTheServerLives:
    @on_both("ends the process")
    @pytest.mark.parametrize(
        "body",
        [
            b'{"model_name": "x", "url": ',
            b'{"model_name": 7, "url": "/opt/ml/models/x/model"}',
            b'{"model_name": "x", "url": ["/opt/ml/models/x/model"]}',
            # the example of AWS's own contract
            b'{"model_name" : "x", "url" : "/opt/ml/models/x/model",}',
        ],
        ids=["cut off", "name is no string", "url is no string", "trailing comma"],
    )
    def test_a_body_that_is_wrong(self, endpoint: Endpoint, body: bytes) -> None:
        reply = endpoint.request("POST", "/models", body, {"Content-Type": "application/json"})

        assert reply.status == 400
        assert error_of(reply)
        assert endpoint.is_serving()

    @on_both("text/plain, and does not say what is missing")
    @pytest.mark.parametrize("extra", [{}, {"model_name": ""}], ids=["none", "empty"])
    def test_no_model_name(self, endpoint: Endpoint, extra: dict[str, str]) -> None:
        body = {"url": str(endpoint.model())} | extra

        reply = endpoint.request("POST", "/models", body, seconds=4)

        assert reply.status == 400
        assert "model_name" in error_of(reply)

    @on_both("ends the process")
    def test_a_body_of_65536_chunks(self, endpoint: Endpoint) -> None:
        def chunks() -> Iterator[bytes]:
            yield from (b"x" for _ in range(65536))

        reply = endpoint.request("POST", "/models", chunks())

        assert reply.status in {400, 413}
        assert error_of(reply)
        assert endpoint.is_serving()
