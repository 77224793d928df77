"""POST /models/{model_name}/invoke with small bodies."""

import gzip
import json
import struct
import zlib

import pytest

from tests.asking import BINARY, JSON, binary_request, refusal, sized
from tests.cases import rows
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = pytest.mark.triton

_PATH = "/models/echo/invoke"
_OUTPUT = [{"name": "OUT", "parameters": {"binary_data": True}}]


@pytest.fixture(scope="module")
def moody(served, model_root) -> str:
    """A model that fails as its input says; stays loaded for the module, as echo does."""
    folder = write_python_model(
        model_root / "moody",
        answer="""\
            kind = int(values[0])
            if kind == 1:
                raise ValueError("the model is in a mood")
            if kind == 2:
                error = pb_utils.TritonError("not among mine", pb_utils.TritonError.NOT_FOUND)
                return pb_utils.InferenceResponse(error=error)
            if kind == 3:
                error = pb_utils.TritonError("too odd for me", pb_utils.TritonError.INVALID_ARG)
                return pb_utils.InferenceResponse(error=error)
            if kind == 4:
                error = pb_utils.TritonError("resting", pb_utils.TritonError.UNAVAILABLE)
                return pb_utils.InferenceResponse(error=error)
        """,
    )
    with served.client() as client:
        client.load_model("moody", folder)
    return "/models/moody/invoke"


@rows(
    "kind",
    [
        f"{BINARY};json-header-size={{}}",
        f"{BINARY}; json-header-size={{}}",
        f"{BINARY} ;  json-header-size = {{}} ",
        f"{BINARY};json-header-size={{}};charset=utf-8",
        f"{BINARY};charset=utf-8; json-header-size={{}}",
        f"{BINARY.upper()};JSON-Header-Size={{}}",
        f'{BINARY};json-header-size="{{}}"',
        f"{BINARY};json-header-size=000{{}}",
    ],
)
def test_binary_tensors_go_both_ways(caller, kind):
    body, json_bytes = binary_request(5)

    reply = caller.post(_PATH, body, {"Content-Type": kind.format(json_bytes)})

    assert reply.status == 200
    media_type, _, parameter = reply.headers["Content-Type"].partition(";")
    size = int(parameter.removeprefix("json-header-size="))
    assert media_type == BINARY
    assert json.loads(reply.body[:size])["model_name"] == "echo"
    assert reply.body[size:] == body[json_bytes:]


def test_json_header_size_of_0_is_raw_tensor(caller):
    reply = caller.post(_PATH, struct.pack("<2f", 1.5, -2.0), sized(0))

    assert (reply.status, reply.body[-8:]) == (200, struct.pack("<2f", 1.5, -2.0))


_BODY, _JSON_BYTES = binary_request(1)
_BAD_SIZES = [
    *("abc", "", "-1", "1.5", "1e2", "0x10", "9" * 40, "²", "1 2"),
    *(_JSON_BYTES - 1, len(_BODY) + 1, len(_BODY) + 10_000_000),
]


@rows(
    "kind",
    [
        *(sized(size)["Content-Type"] for size in _BAD_SIZES),
        *(BINARY, f"{BINARY};", f"text/csv,{BINARY};json-header-size=1"),
    ],
)
def test_invalid_json_header_size_is_refused(caller, kind):
    for body in (_BODY, iter([_BODY])):
        reply = caller.post(_PATH, body, {"Content-Type": kind})
        assert refusal(reply)[:2] == (400, "InvalidRequest")


def wrong(**changes: object) -> dict[str, object]:
    body = infer_body(1.0)
    body["inputs"][0] |= changes
    return body


_WRONG = {
    "tensor-name": wrong(name="OTHER"),
    "rank": wrong(shape=[1, 1]),
    "shape": wrong(shape=[7]),
    "datatype": wrong(datatype="INT32"),
    "no-datatype": wrong(datatype=None),
    "strings": wrong(data=["a"]),
    "no-inputs": {"inputs": []},
    "unknown-output": infer_body(1.0) | {"outputs": [{"name": "OTHER"}]},
    "inputs-no-list": {"inputs": 7},
    "id-no-text": infer_body(1.0) | {"id": {}},
    "empty-object": {},
    "no-object": [1],
    "no-json": b"{",
    "random": bytes(range(256)),
}


@rows("body", _WRONG.values())
def test_request_not_fitting_the_model_is_callers_fault(caller, body):
    assert refusal(caller.post(_PATH, body)) == (400, "InvalidRequest", "echo")


@rows(
    "body",
    [
        infer_body(1.0, 2.5),
        infer_body(0.1) | {"id": "a/b c"},
        infer_body(1.0) | {"outputs": _OUTPUT},
        infer_body(1.0) | {"parameters": {"binary_data_output": True}, "unheard_of": [1]},
        infer_body(1.0) | {"parameters": {"sequence_id": 7, "sequence_start": True}},
        infer_body(1.0) | {"parameters": {"timeout": 5_000_000, "priority": 1}},
        infer_body(),
    ],
)
@rows("packed", ["", "gzip", "deflate"])
def test_tritons_answer_is_passed_on_byte_for_byte(caller, raw_triton, body, packed):
    headers = {"Accept-Encoding": packed}
    v2 = "/v2/models/echo/infer"
    theirs = raw_triton.post(v2, body, headers)
    for path in (_PATH, v2, "/v2/models/echo/versions/1/infer"):
        ours = caller.post(path, body, headers)
        assert (ours.status, ours.body) == (theirs.status, theirs.body)
        for header in ("Content-Encoding", "Content-Length"):
            assert ours.headers[header] == theirs.headers[header]
        size = theirs.headers["Inference-Header-Content-Length"]
        if path == _PATH:
            binary = f"{BINARY};json-header-size={size}"
            assert ours.headers["Content-Type"] == (JSON if size is None else binary)
        else:
            assert ours.headers["Content-Type"] == theirs.headers["Content-Type"]
            assert ours.headers["Inference-Header-Content-Length"] == size


@rows("name", ["gzip", "deflate", "GZIP"])
@rows("kind", ["json", "binary"])
def test_a_packed_body_is_unpacked(caller, name, kind):
    plain, headers = json.dumps(infer_body(2.0)).encode(), {}
    if kind == "binary":
        plain, size = binary_request(1000)
        headers = sized(size)
    body = zlib.compress(plain) if name == "deflate" else gzip.compress(plain)

    reply = caller.post(_PATH, body, headers | {"Content-Encoding": name})

    assert reply.status == 200


@rows("name", ["br", "zstd", "gzip, gzip", "nonsense"])
def test_an_unsupported_content_encoding_is_refused(caller, name):
    for path in (_PATH, "/v2/models/echo/infer"):
        reply = caller.post(path, infer_body(1.0), {"Content-Encoding": name})

        assert refusal(reply)[:2] == (400, "InvalidRequest")
        why = f"Content-Encoding {name!r}; gzip and deflate are understood"
        assert reply.error == why


def not_packed_so() -> dict[str, tuple[str, bytes]]:
    """Content-Encoding and a body. Triton takes each for an empty one, or for its beginning."""
    plain = json.dumps(infer_body(1.0)).encode()
    packed, raw = gzip.compress(plain), zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return {
        "plain as gzip": ("gzip", plain),
        "plain as deflate": ("deflate", plain),
        "deflate without zlib's header": ("deflate", raw.compress(plain) + raw.flush()),
        "nothing as gzip": ("gzip", b""),
        "nothing in it": ("gzip", gzip.compress(b"")),
        "cut off": ("gzip", packed[:-1]),
        "wrong check": ("gzip", packed[:-8] + bytes(4) + packed[-4:]),
        "bytes behind it": ("gzip", packed + b"x"),
        "a second member": ("gzip", packed + packed),
        "large": ("gzip", gzip.compress(plain + b" " * 2**21, 0)[:-1]),
    }


@pytest.mark.parametrize("how", ["whole", "chunked"])
@rows("path", [_PATH, "/v2/models/echo/infer"])
@rows(("coding", "body"), not_packed_so().values())
def test_wrongly_compressed_body_is_refused(caller, path, coding, body, how):
    headers = {"Content-Encoding": coding}

    reply = caller.post(path, iter([body]) if how == "chunked" else body, headers)

    assert refusal(reply) == (400, "InvalidRequest", "echo")
    assert caller.post(_PATH, infer_body(1.0)).status == 200


@rows("body", [b"", iter([b""])])
def test_an_invocation_without_a_body_is_refused(caller, body):
    reply = caller.post(_PATH, body)

    assert refusal(reply) == (400, "InvalidRequest", "echo")
    assert reply.error == "a body is needed"


@rows(
    ("kind", "refused", "words"),
    [
        (1, (500, "InferenceFailed", "moody"), "the model is in a mood"),
        (2, (500, "InferenceFailed", "moody"), "not among mine"),
        (3, (400, "InvalidRequest", "moody"), "too odd for me"),
        (4, (503, "BackendUnavailable", "moody"), "resting"),
    ],
)
def test_a_models_own_errors_keep_their_words(caller, moody, kind, refused, words):
    """Its NOT_FOUND says nothing about what the platform has loaded."""
    reply = caller.post(moody, infer_body(kind))
    assert refusal(reply) == refused
    assert words in reply.error
    assert caller.post(moody, infer_body(0.0)).status == 200


def test_a_decoupled_model_is_refused(served, caller, model_root):
    config = CONFIG + "model_transaction_policy { decoupled: true }\n"
    folder = write_python_model(model_root / "decoupled", config=config)
    caller.load_model("decoupled", folder)

    for path in ("/models/decoupled/invoke", "/v2/models/decoupled/infer"):
        reply = caller.post(path, infer_body(1.0))
        assert refusal(reply) == (400, "InvalidRequest", "decoupled")
        assert "decoupled transaction policy; it takes generate_stream" in reply.error


_IDS = {
    "X-Amzn-SageMaker-Custom-Attributes": "trace=1;x=y z",
    "X-Amzn-SageMaker-Inference-Id": "id-8",
}


@rows("body", [infer_body(1.0), b"{"])
def test_attributes_and_inference_id_come_back(caller, body):
    """What is not printable ASCII does not."""
    reply = caller.post(_PATH, body, _IDS)
    assert {name: reply.headers[name] for name in _IDS} == _IDS
    for odd in ("caf\xe9", "a\tb", "\xff\xfe"):
        reply = caller.post(_PATH, body, dict.fromkeys(_IDS, odd))
        assert reply.status in {200, 400}
        assert not set(_IDS) & set(reply.headers)


def test_failed_inference_is_logged_with_platform_headers(served, caller):
    target = {"X-Amzn-SageMaker-Target-Model": "team/b.tar.gz"}

    def refused() -> None:
        caller.post("/models/nobody/invoke", infer_body(1.0), _IDS | target)

    line = served.line_of(refused, "request.failed", target_model="team/b.tar.gz")
    assert (line["inference_id"], line["custom_attributes"]) == ("id-8", "trace=1;x=y z")
    assert line["error"] == "ModelNotFound"


def test_unknown_v2_headers_are_ignored(caller):
    headers = {
        "X-Amzn-SageMaker-Session-Id": "s",
        "X-Never-Heard-Of": "1",
        "Inference-Header-Content-Length": "3",
        "Accept": "image/png",
        "Cookie": "a=b",
    }

    assert caller.post(_PATH, infer_body(1.0), headers).status == 200


def test_misnamed_output_is_warned_of_once(served, caller, package):
    answer = 'return pb_utils.InferenceResponse([pb_utils.Tensor("OUTT", values)])'
    caller.load_model("misspelt", write_python_model(package, answer=answer))
    for path in ("/models/misspelt/invoke", "/v2/models/misspelt/infer"):
        assert caller.post(path, infer_body(1.0)).json()["outputs"] == []
    happened = served.state()["events"]
    caller.unload("misspelt")
    served.wait_for("model.unloaded", model_id="misspelt")

    said = "the model answered without its output 'OUT'; does its code name the output otherwise?"
    [line] = served.events("model.outputs_missing")
    assert (line["model_id"], line["reason"], line["level"]) == ("misspelt", said, "warning")
    [event] = [each for each in happened if each["model_id"] == "misspelt" and each["reason"]]
    assert (event["operation"], event["reason"], event["count"]) == ("infer", said, 1)
