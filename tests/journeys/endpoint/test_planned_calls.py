"""Planned calls of the endpoint are answered as those that a handler answers."""

import json
import shutil

import pytest

from tests.asking import binary_request, sized
from tests.journeys.endpoint.conftest import NAMES
from tests.journeys.endpoint.test_invoke import BODY
from tests.running import Reply
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

PATH = "/endpoints/any/invocations"
TARGET = "X-Amzn-SageMaker-Target-Model"
# No call whose Connection names a trace is planned.
HANDLED = {"Connection": "traceparent"}
TRIES = """\
import pathlib
tries = pathlib.Path({path!r})
tries.write_text((tries.read_text() if tries.exists() else "") + "x")
if len(tries.read_text()) <= {failures}:
    raise MemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
"""


def told(reply: Reply, name: str) -> tuple[object, ...]:
    """All that an answer says but what differs from call to call."""
    headers = {key.lower(): value for key, value in reply.headers.items()}
    request_id = headers.pop("x-amzn-requestid")
    headers.pop("date")
    body = reply.body.replace(request_id.encode(), b"ID")
    if "Content-Length" in reply.headers:
        assert int(headers.pop("content-length")) == len(reply.body)
    return reply.status, headers, body.replace(name.encode(), b"NAME")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "kind", ["json", "binary", "long json", "long binary", "wrong", "no json", "variant"]
)
def test_planned_and_handled_calls_are_answered_alike(caller, name, kind):
    body, headers = json.dumps(BODY).encode(), {TARGET: name}
    match kind:
        case "binary" | "long binary":
            body, size = binary_request(3 if kind == "binary" else 60_000)
            headers |= sized(size)
        case "long json":
            data = [0.25] * 20_000
            tensor = {"name": "IN", "datatype": "FP32", "shape": [len(data)], "data": data}
            body = json.dumps({"inputs": [tensor]}).encode()
        case "wrong":
            body = b'{"inputs": []}'
        case "no json":
            body = b"{"
        case "variant":
            headers["X-Amzn-SageMaker-Target-Variant"] = "blue"
    planned = told(caller.post(PATH, body, headers), name)
    assert planned == told(caller.post(PATH, body, headers | HANDLED), name)


@pytest.mark.parametrize(
    "headers",
    [
        {TARGET: "../a"},
        {TARGET: "none"},
        {},
        {TARGET: "plain", "X-Amzn-SageMaker-Session-Id": "NEW_SESSION"},
        {TARGET: "plain", "X-Amzn-SageMaker-Inference-Id": "i" * 65},
    ],
)
def test_what_is_refused_is_refused_alike(caller, headers):
    name = headers.get(TARGET, "none")
    kinds = ({}, HANDLED)
    planned, handled = (told(caller.post(PATH, BODY, headers | more), name) for more in kinds)
    assert planned == handled
    assert planned[0] == 400


def test_recently_broken_archive_is_refused_alike(caller, bucket):
    bucket.put({"models/broken.tar.gz": b"this is none"})
    asked = {TARGET: "broken.tar.gz"}
    first = told(caller.post(PATH, BODY, asked), "broken.tar.gz")
    kinds = ({}, HANDLED)
    found = [told(caller.post(PATH, BODY, asked | more), "broken.tar.gz") for more in kinds]
    assert found == [first, first]


@pytest.mark.parametrize(
    ("headers", "case"),
    [({}, (1, 200)), (HANDLED, (9, 424))],
    ids=["then it fits", "it never fits"],
)
def test_inference_is_sent_again_after_out_of_memory(store, start, tmp_path, headers, case):
    """Without measured memory words alone evict a model. Where memory is measured, its figures
    must agree.
    """
    path = tmp_path / "tries"
    failures, status = case
    answer = TRIES.format(path=str(path), failures=failures)
    asking = write_python_model(tmp_path / "asking", answer=answer)
    store.put("victim", 1)
    shutil.copytree(asking, store.path / "asking")
    caller = start("--on-demand", "--memory-source=off")
    caller.invoke("victim")
    # only calls of loaded models are planned
    assert caller.http.post("/v2/repository/models/asking/load").status == 200
    reply = caller.http.post(PATH, BODY, {TARGET: "asking", **headers})
    assert (reply.status, path.read_text()) == (status, "xx")
    assert caller.loaded() == ["asking"]
