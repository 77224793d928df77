"""Content types of models with one input that opted into them, with a real Triton behind."""

import base64
import io
import json
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.asking import refusal
from tests.cases import rows
from tests.journeys.sagemaker.test_bodies import peak_rss, reset_peak
from tests.running import (
    Client,
    Reply,
    RunningAdapter,
    unload_all,
)
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

JSON, NPY, CSV, RAW, TEXT = (
    *("application/json", "application/x-npy", "text/csv", "application/octet-stream"),
    "text/plain",
)
BINARY = "application/vnd.sagemaker-triton.binary+json"
MIB = 2**20
# A JPEG of one grey pixel
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQEASABIAAD/2wBDAAMCAgICAgMCAgIDAwMDBAYEBAQEBAgGBgUGCQgKCgkICQkKDA8MCgsOCwkJDR"
    "ENDg8QEBEQCgwSExIQEw8QEBD/yQALCAABAAEBAREA/8wABgAQEAX/2gAIAQEAAD8A0s8g/9k="
)
RECORDED = json.loads((Path(__file__).parents[2] / "data/sagemaker_serializers.json").read_text())
SENT = [case for sender in RECORDED["senders"] for case in sender["cases"]]
VALUES = [[0, 1.5, 2], [3, 4, 5]]


def config(
    types: str, datatype: str, dims: str = "[-1]", outputs: int = 1, max_batch_size: int = 0
) -> str:
    more = [f', {{ name: "OUT{n}" data_type: TYPE_FP32 dims: [-1] }}' for n in range(outputs - 1)]
    given = f'parameters {{ key: "adapter_content_types" value {{ string_value: "{types}" }} }}\n'
    return (
        f'backend: "python"\nmax_batch_size: {max_batch_size}\n'
        f'input [{{ name: "IN" data_type: {datatype} dims: {dims} }}]\n'
        f'output [{{ name: "OUT" data_type: {datatype} dims: {dims} }}{"".join(more)}]\n'
    ) + (given if types else "")


MODELS = {
    # whose input is its output
    "numbers": config(f"{NPY};cast, {CSV}, {RAW}", "TYPE_FP32", max_batch_size=1024),
    "strict": config(f"{NPY}, {CSV}", "TYPE_FP32", "[-1, -1]"),
    "images": config("image/*, application/pdf", "TYPE_STRING", "[1]"),
    "texts": config("text/plain", "TYPE_STRING"),
    "two": config(NPY, "TYPE_FP32", outputs=2),
    "integers": config(f"{NPY};cast", "TYPE_UINT8", "[-1, -1]"),
    "halves": config(f"{NPY};cast", "TYPE_FP16", "[-1, -1]"),
    "plain": config("", "TYPE_FP32", max_batch_size=1024),
}
BOTH = 'return pb_utils.InferenceResponse([pb_utils.Tensor(n, values) for n in ("OUT", "OUT0")])'
FINDERS = {"boxes": ("TYPE_FP32", "float32"), "flags": ("TYPE_BOOL", "bool")}
FINDER = """\
backend: "python"
input [{ name: "IN" data_type: TYPE_STRING dims: [1] }]
output [{ name: "OUT" data_type: %s dims: [-1, 4] }]
parameters { key: "adapter_content_types" value { string_value: "image/*" } }
"""


@pytest.fixture(scope="module")
def adapter(shared_adapter, model_root) -> Iterator[RunningAdapter]:
    with shared_adapter.client() as client:
        for name, text in MODELS.items():
            answer = BOTH if name == "two" else "pass"
            folder = write_python_model(model_root / f"typed {name}", config=text, answer=answer)
            client.load_model(name, folder)
        first = "values = values.reshape(-1)[:1].reshape(1, 1)"
        folder = write_python_model(
            model_root / "typed first",
            config=config(f"{NPY};cast", "TYPE_FP32", "[-1, -1]"),
            answer=first,
        )
        client.load_model("first", folder)
        for name, (datatype, dtype) in FINDERS.items():
            folder = write_python_model(
                model_root / f"typed {name}",
                config=FINDER % datatype,
                imports="import numpy",
                answer=f"values = numpy.ones((len(values[0]) - 1, 4), '{dtype}')",
            )
            client.load_model(name, folder)
        yield shared_adapter
        unload_all(shared_adapter)


def saved(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), version)
    return file.getvalue()


def v2(*rows: list[float]) -> bytes:
    data, shape = [value for row in rows for value in row], [len(rows), len(rows[0])]
    tensor = {"name": "IN", "datatype": "FP32", "shape": shape, "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


def invoke(
    client: Client, name: str, body: Any, content_type: str = "", accept: str = "", **more: str
) -> Reply:
    named = {"Content-Type": content_type, "Accept": accept, **more}
    given = {key.replace("_", "-"): value for key, value in named.items() if value}
    return client.post(f"/models/{name}/invoke", body, given)


def told(reply: Reply) -> Any:
    """The values of an answer, by its type."""
    assert reply.status == 200, reply.body
    media_type = reply.headers["Content-Type"].partition(";")[0]
    if media_type == NPY:
        return np.load(io.BytesIO(reply.body)).tolist()
    if media_type == CSV:
        return [[float(value) for value in row.split(",")] for row in reply.body.decode().split()]
    if media_type == BINARY:
        size = int(reply.headers["Content-Type"].partition("=")[2])
        output = json.loads(reply.body[:size])["outputs"][0]
        # JSON that asks for no raw tensors has none, whatever the type of the answer
        is_raw = "data" not in output
        values = np.frombuffer(reply.body[size:], "<f4") if is_raw else output["data"]
        values = np.array(values)
    else:
        output = reply.json()["outputs"][0]
        values = np.array(output["data"])
    return values.reshape(output["shape"]).tolist()


@rows("case", SENT)
def test_sdk_serializers_read_what_they_asked_for(client, case):
    body = base64.b64decode(case["body"])
    reply = client.post("/models/numbers/invoke", body, case["headers"])
    # bytes without a shape are one example
    expected = (
        [[*VALUES[0], *VALUES[1]]] if case["case"] == "IdentitySerializer, values" else VALUES
    )
    assert told(reply) == expected
    accepted = case["headers"]["Accept"]
    assert reply.headers["Content-Type"] == (JSON if accepted == "*/*" else accepted)


def test_curl_has_the_answer_to_a_jpeg(adapter, tmp_path):
    image = tmp_path / "image.jpg"
    image.write_bytes(JPEG)
    url = f"http://{adapter.http}/models/images/invoke"
    asked = ["curl", "-sS", "--fail", "-H", "Content-Type: image/jpeg", "--data-binary"]
    found = subprocess.run(
        [*asked, f"@{image}", "-H", f"Accept: {RAW}", url],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert found.stdout == JPEG


@pytest.mark.parametrize("accept", ["", "*/*", JSON, BINARY, NPY, CSV])
@rows(
    ("content_type", "body"),
    [
        *(("", v2(*VALUES)), (JSON, v2(*VALUES)), (RAW, b" \n" + v2(*VALUES))),
        *((NPY, saved(np.array(VALUES, "f4"))), (CSV, b"0,1.5,2\n3,4,5\n")),
    ],
)
def test_any_body_type_has_any_answer_type(client, content_type, body, accept):
    reply = invoke(client, "numbers", body, content_type, accept)
    assert told(reply) == VALUES
    wanted = JSON if accept in {"", "*/*"} else accept
    assert reply.headers["Content-Type"].partition(";")[0] == wanted


def test_bytes_are_one_example_of_their_values(client):
    raw = np.array([1, 2, 3], "<f4").tobytes()
    reply = invoke(client, "numbers", raw, RAW, RAW)
    assert (reply.headers["Content-Type"], reply.body) == (RAW, raw)
    assert refusal(invoke(client, "numbers", raw[:-1], RAW))[0] == 400


def test_a_string_is_the_body_as_it_is(client):
    every = bytes(range(256)) * 3
    for body in (every, every * 10_000):  # whole, and as a stream
        assert invoke(client, "images", body, "image/png", RAW).body == body
        assert invoke(client, "images", iter([body[:5], body[5:]]), "image/png", RAW).body == body
    assert refusal(invoke(client, "images", b"", "image/png"))[0] == 400


@rows(
    ("name", "content_type"),
    [
        *(("images", NPY), ("images", RAW), ("images", "text/plain"), ("images", "audio/wav")),
        *(("numbers", "image/jpeg"), ("numbers", "application/x-npz"), ("strict", RAW)),
        *(("numbers", "application/x-www-form-urlencoded"), ("numbers", "text/libsvm")),
    ],
)
def test_other_content_type_is_415_with_a_list(client, name, content_type):
    reply = invoke(client, name, b"\1\2\3\4", content_type)
    assert refusal(reply) == (415, "UnsupportedMediaType", name)
    assert reply.headers["Accept"] in reply.error
    assert reply.headers["Accept"].startswith(f"{JSON}, {BINARY}, ")
    assert invoke(client, "numbers", v2([1.0])).status == 200  # on the same connection


def tensor(datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "datatype": datatype, "shape": shape, "data": data}]}


ANY = f"any answer can be {JSON} or {BINARY}"


EITHER = f"{JSON}, {BINARY}"


@rows(
    ("name", "sent", "accept", "why"),
    [
        ("numbers", (CSV, b"1"), "text/html", EITHER),
        ("numbers", (JSON, v2([1.0])), "image/png, application/json;q=0", EITHER),
        ("images", ("image/png", b"1"), NPY, EITHER),
        ("images", ("image/png", b"1"), CSV, EITHER),
        ("images", (JSON, tensor("BYTES", [1], ["a"])), CSV, ANY),
        ("two", (NPY, saved(np.zeros(1, "f4"))), NPY, EITHER),
        ("two", (JSON, tensor("FP32", [1], [1])), NPY, "2 outputs, and only one can be converted"),
        (
            "texts",
            (JSON, tensor("BYTES", [2], ["a", "b"])),
            TEXT,
            "it has 2 strings; only a single one can",
        ),
        ("numbers", (JSON, tensor("FP32", [1, 1], [1])), TEXT, f"it is FP32 and no string; {ANY}"),
    ],
)
def test_unacceptable_answer_is_406_with_types(client, name, sent, accept, why):
    content_type, body = sent
    reply = invoke(client, name, body, content_type, accept)
    assert refusal(reply) == (406, "NotAcceptable", name)
    assert why in reply.error


@rows("accept", [TEXT, f"{TEXT}; charset=utf-8", "text/*", f"text/html, {TEXT};q=0.1"])
def test_one_string_is_text_for_who_accepts_that(client, accept):
    for said in ("é " * 20, "é " * MIB):  # whole, and as a stream
        reply = invoke(client, "texts", said.encode(), TEXT, accept)
        assert (reply.status, reply.body.decode()) == (200, said)
        assert reply.headers["Content-Type"] == f"{TEXT}; charset=utf-8"


@rows(
    ("name", "content_type", "body", "why"),
    [
        ("strict", CSV, b"1,2\n3", "row 2 has 1 values"),
        ("strict", CSV, b"", "no values"),
        ("strict", NPY, b"", "within its head"),
        ("strict", NPY, saved(np.zeros((2, 2), "f4"))[:-1], "the body has 15 of the 16 bytes"),
        ("strict", NPY, saved(np.zeros((2, 2), "f4")) + b"x", "more than the 16 bytes"),
        ("strict", NPY, saved(np.zeros((2, 2, 2), "f4")), "shape"),
        ("strict", NPY, saved(np.array([[1]])), "; with application/x-npy;cast in the model's"),
        ("integers", NPY, saved(np.array([[0, 256]])), "256 is out of the range of UINT8"),
        (
            *("integers", NPY, saved(np.array([[1.0]]))),
            "; floating-point numbers do not become integers",
        ),
        ("numbers", NPY, saved(np.array([[True]])), "the array is BOOL, input 'IN' is FP32"),
    ],
)
def test_body_of_wrong_type_is_400_with_reason(client, name, content_type, body, why):
    for sent in (body, iter([body[:3], body[3:]])):
        reply = invoke(client, name, sent, content_type)
        assert refusal(reply) == (400, "InvalidRequest", name)
        assert why in reply.error


@rows(
    ("name", "array"),
    [
        ("numbers", np.random.default_rng(1).normal(size=(50, 3))),
        ("numbers", np.array([[1, 2], [3, 2**31]])),
        ("numbers", np.array([[0.1, 6e4]], "f2")),
        ("integers", np.arange(256).reshape(16, 16)),
        ("strict", np.zeros((0, 4), "f4")),
    ],
)
def test_numbers_become_the_inputs_type_as_in_numpy(client, name, array):
    """However the body is cut."""
    body = saved(array)
    cut = iter([body[i : i + 7] for i in range(0, len(body), 7)])
    for sent in (body, cut):
        found = np.load(io.BytesIO(invoke(client, name, sent, NPY, NPY).body))
        assert (found.shape, found.dtype) == (array.shape, "u1" if name == "integers" else "f4")
        assert (found == array.astype(found.dtype)).all()


def test_fp16_has_no_json_form(client):
    array = np.array([[0.1, 7e4]])
    for accept in ("", "*/*", JSON):
        assert refusal(invoke(client, "halves", saved(array), NPY, accept))[0] == 400
    with np.errstate(over="ignore"):
        expected = array.astype("f2")
    reply = invoke(client, "halves", saved(array), NPY, NPY)
    assert np.array_equal(np.load(io.BytesIO(reply.body)), expected)
    assert invoke(client, "halves", saved(array), NPY, RAW).body == expected.tobytes()
    assert invoke(client, "halves", saved(array), NPY, BINARY).body.endswith(expected.tobytes())


def test_json_with_binary_output_ignores_accept(client):
    body = json.loads(v2(*VALUES)) | {"parameters": {"binary_data_output": True}}
    for accept in ("", JSON):
        reply = invoke(client, "numbers", body, JSON, accept)
        assert reply.headers["Content-Type"].startswith(BINARY)
        assert told(reply) == VALUES


@pytest.mark.parametrize("name", FINDERS)
def test_empty_result_is_an_empty_array_or_table(client, name):
    for found in (0, 2):
        boxes = np.ones((found, 4), FINDERS[name][1])
        image = b"x" * (1 + found)
        for accept, body in {CSV: b"1,1,1,1\n" * found, RAW: boxes.tobytes()}.items():
            reply = invoke(client, name, image, "image/png", accept)
            assert (reply.status, reply.headers["Content-Type"]) == (200, accept), reply.body
            assert reply.body == body
        for accept in (NPY, JSON):
            reply = invoke(client, name, image, "image/png", accept)
            assert np.array_equal(told(reply), boxes.tolist())
        reply = invoke(client, name, image, "image/png", BINARY)
        assert reply.body.endswith(b"}}]}" + boxes.tobytes())


def test_csv_has_a_limit(client):
    row = b",".join([b"0.25"] * 1000) + b"\n"
    reply = invoke(client, "strict", row * 200, CSV, CSV)
    assert reply.body == row * 200
    reply = invoke(client, "strict", row * 2000, CSV)
    assert refusal(reply)[:2] == (413, "PayloadTooLarge")
    assert str(8 * MIB) in reply.error


def test_compressed_bodies_of_these_types_are_refused(client):
    reply = invoke(client, "numbers", b"x", NPY, Content_Encoding="gzip")
    assert refusal(reply)[:2] == (415, "UnsupportedMediaType")
    packed = zlib.compress(np.ones(3, "f4").tobytes())
    reply = invoke(client, "numbers", packed, RAW, Content_Encoding="deflate")
    assert refusal(reply) == (415, "UnsupportedMediaType", "numbers")
    assert RAW in reply.headers["Accept"]
    packed = zlib.compress(v2(*VALUES))  # as clients send JSON
    assert told(invoke(client, "numbers", packed, RAW, Content_Encoding="deflate")) == VALUES


def test_json_is_recognized_within_4096_bytes(adapter, client):
    assert told(invoke(client, "strict", b" " * 4095 + v2(*VALUES), RAW)) == VALUES
    for body in (b" " * 4096 + v2(*VALUES), b" " * 32 * MIB):
        pid = adapter.process.pid
        reset_peak(pid)
        before = peak_rss(pid)
        assert refusal(invoke(client, "strict", body, RAW))[:2] == (415, "UnsupportedMediaType")
        assert peak_rss(pid) - before < 20 * MIB


@pytest.mark.parametrize("content_type", ["", JSON, NPY, CSV, RAW, "image/png", "text/plain", "x"])
@rows("accept", ["", "text/html", NPY])
def test_model_without_opt_in_takes_json_alone(client, content_type, accept):
    """Whatever its type is said to be. Another body is told what its type would need."""
    reply = invoke(client, "plain", v2(*VALUES), content_type, accept)
    assert (told(reply), reply.headers["Content-Type"]) == (VALUES, JSON)
    for body in (b"\1\2", iter([b"\1", b"\2"])):
        reply = invoke(client, "plain", body, content_type, accept)
        assert refusal(reply) == (400, "InvalidRequest", "plain")
        assert "failed to parse the request JSON buffer" in reply.error
        if content_type in {NPY, CSV, RAW, "image/png"}:
            needed = f"to take '{content_type}' the model needs the parameter adapter_content_types"
            assert needed in reply.error


@given(st.binary(max_size=150), st.integers(0, 150), st.sampled_from([NPY, CSV, RAW, "image/png"]))
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_body_gets_its_answer_or_refusal(client, noise, at, content_type):
    whole = saved(np.array(VALUES, "f4"))
    body = whole[:at] + noise + whole[at + len(noise) :] if content_type == NPY else noise
    reply = invoke(client, "numbers", body, content_type, NPY)
    if reply.status != 200:
        assert reply.status in {400, 415}, reply.body
        assert refusal(reply)[2] == "numbers"
        return
    answer = np.load(io.BytesIO(reply.body))
    if content_type == NPY:
        assert answer.tobytes() == np.load(io.BytesIO(body)).astype("f4").tobytes()
    elif content_type == RAW:
        assert answer.tobytes() == body
    after = invoke(client, "numbers", b"7", CSV, CSV)
    assert after.body == b"7\n"


@rows(("name", "dtype"), [("first", "f4"), ("first", "f8"), ("numbers", "f4")])
def test_large_arrays_are_passed_on_without_being_held(adapter, client, name, dtype):
    """100 MiB of a request, as it is and converted, and of an answer."""
    array = np.ones((100, 2**20 // np.dtype(dtype).itemsize), dtype)
    pid = adapter.process.pid
    reset_peak(pid)
    before = peak_rss(pid)
    answer = np.load(io.BytesIO(invoke(client, name, saved(array), NPY, NPY).body))
    assert (answer == (array if name == "numbers" else [[1.0]])).all()
    assert peak_rss(pid) - before < 20 * MIB


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (config("image/*", "TYPE_FP32"), "image/* needs TYPE_STRING"),
        (config("application/x-npz", "TYPE_FP32"), "unknown content type 'application/x-npz'"),
    ],
)
def test_wrong_list_fails_load_with_file_and_line(client, package, text, why):
    write_python_model(package, config=text)
    reply = client.load("wrong", package)
    assert refusal(reply)[:2] == (400, "InvalidModel")
    assert f"config.pbtxt:{len(text.splitlines())}: parameter adapter_content_types" in (
        reply.error
    )
    assert why in reply.error
