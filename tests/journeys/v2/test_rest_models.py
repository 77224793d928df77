"""V2 REST at the http listener, beside the same calls at the Triton behind it."""

import json
import struct
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection

import pytest

from tests.asking import Gate, background, binary_request, quoted, refusal
from tests.cases import rows
from tests.processes import triton_client
from tests.running import EXAMPLES, Client, RunningAdapter, unload_all, wait_until
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = pytest.mark.triton

ODD = 'team/modèle "1"'
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"
SIZE = "Inference-Header-Content-Length"

# Sends one answer, then stands at its gate until that opens or the caller has gone.
_TALKS = """
import pathlib, time
import numpy
import triton_python_backend_utils as pb_utils

GATE = pathlib.Path({gate!r})

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            self.say(sender, 1.0)
            while not GATE.exists():
                if request.is_cancelled():
                    GATE.with_suffix(".cancelled").touch()
                    break
                time.sleep(0.01)
            self.say(sender, 2.0)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def say(self, sender, value):
        tensor = pb_utils.Tensor("OUT", numpy.array([value], numpy.float32))
        sender.send(pb_utils.InferenceResponse([tensor]))
"""


@pytest.fixture(scope="module")
def adapter(shared_adapter) -> Iterator[RunningAdapter]:
    """The shared adapter with one model under two names, of which Triton knows one."""
    with shared_adapter.client() as client:
        for name in ("echo", ODD):
            client.load_model(name, EXAMPLES / "identity")
        yield shared_adapter
    unload_all(shared_adapter)


@pytest.fixture
def raw(adapter) -> Iterator[Client]:
    """The Triton behind the adapter, asked directly."""
    with triton_client(adapter) as client:
        yield client


def load_talker(client: Client, package, gate: Gate, name: str) -> str:
    """A decoupled model of that name; its path."""
    write_python_model(package, config=DECOUPLED)
    (package / "1" / "model.py").write_text(_TALKS.format(gate=str(gate.path)))
    client.load_model(name, package)
    return f"/v2/models/{quoted(name)}/generate_stream"


@rows("call", ["", "/config"])
def test_a_model_is_described_under_its_callers_name(client, raw, call):
    ours = client.get(f"/v2/models/{quoted(ODD)}{call}").json()
    theirs = raw.get(f"/v2/models/echo{call}").json()
    assert ours["name"] == ODD
    for key in ("versions", "inputs", "outputs") if call == "" else ("backend", "input", "output"):
        assert ours[key] == theirs[key]


def test_statistics_name_models_as_their_callers_do(client):
    one = client.get(f"/v2/models/{quoted(ODD)}/stats").json()["model_stats"]
    assert [found["name"] for found in one] == [ODD]
    every = client.get("/v2/models/stats").json()["model_stats"]
    assert sorted(found["name"] for found in every) == sorted(["echo", ODD])


def test_body_of_any_size_reaches_triton(client):
    reply = client.post("/v2/models/echo/infer", b" " * (64 * 2**20 + 1))
    assert reply.status == 400
    assert "failed to parse the request JSON buffer" in reply.error


@rows("packed", ["", "gzip"])
def test_answer_has_the_callers_model_name(client, packed):
    path, packing = f"/v2/models/{quoted(ODD)}/infer", {"Accept-Encoding": packed}
    assert client.post(path, infer_body(1.5), packing).json()["model_name"] == ODD
    body, size = binary_request(3)
    reply = client.post(path, body, {SIZE: str(size)} | packing)
    length = int(reply.headers[SIZE])
    assert json.loads(reply.body[:length])["model_name"] == ODD
    assert reply.body[length:] == struct.pack("<f", 0.5) * 3


@rows("name", ["echo", ODD])
def test_generate_is_passed_on(client, name):
    reply = client.post(f"/v2/models/{quoted(name)}/generate", {"IN": 1.5})
    assert reply.json() == {"OUT": 1.5, "model_name": name, "model_version": "1"}
    reply = client.post(f"/v2/models/{quoted(name)}/generate_stream", {"IN": 1.5})
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    (event,) = reply.body.decode().removesuffix("\n\n").split("\n\n")
    assert json.loads(event.removeprefix("data: "))["model_name"] == name


@pytest.mark.parametrize("name", ["talker", "a talker"])
def test_stream_events_come_one_by_one(adapter, client, package, gate, name):
    path = load_talker(client, package, gate, name)
    with closing(HTTPConnection(adapter.http, timeout=30)) as connection:
        connection.request("POST", path, json.dumps({"IN": 1.0}))
        response = connection.getresponse()
        first = json.loads(response.readline().removeprefix(b"data: "))
        assert not gate.path.exists()
        gate.open()
        response.readline()
        second = json.loads(response.readline().removeprefix(b"data: "))
    assert [first["OUT"], second["OUT"]] == [1.0, 2.0]
    assert first["model_name"] == second["model_name"] == name
    client.unload_model(name)


def test_departed_stream_caller_lets_model_finish(adapter, client, package, gate):
    """Triton 2.51 dies of cancelled streams."""
    path = load_talker(client, package, gate, "talker")
    with closing(HTTPConnection(adapter.http, timeout=30)) as connection:
        connection.request("POST", path, json.dumps({"IN": 1.0}))
        connection.getresponse().readline()
    wait_until(lambda: adapter.models()["talker"]["abandoned"] == 1, 20, "it answers nobody")
    gate.open()
    wait_until(lambda: adapter.models()["talker"]["abandoned"] == 0, 20, "it has ended")
    assert not gate.path.with_suffix(".cancelled").exists()
    client.unload_model("talker")


@pytest.mark.parametrize("call", ["infer", "generate", "generate_stream"])
def test_a_model_that_raises_says_why(client, package, call):
    write_python_model(package, answer="raise ValueError('the model is in a mood')")
    client.load_model("moody/1", package)
    body = infer_body(1.0) if call == "infer" else {"IN": 1.0}
    reply = client.post(f"/v2/models/moody%2F1/{call}", body)
    # Triton's generate says 400 to whatever a model does
    expected = (500, "InferenceFailed") if call == "infer" else (400, "InvalidRequest")
    assert refusal(reply) == (*expected, "moody/1")
    assert "the model is in a mood" in reply.error
    assert "ta.u" not in reply.error.partition("At:")[0]
    client.unload_model("moody/1")


def test_inference_waits_for_its_models_load(adapter, client, package, gate):
    write_python_model(package, initialize=gate.statements)
    with background(adapter) as others:
        loaded = others.ask(lambda c: c.load("slow", package).status)
        gate.wait_reached()
        assert refusal(client.get("/v2/models/slow/ready")) == (503, "ModelNotReady", "slow")
        invoked = others.ask(lambda c: c.post("/v2/models/slow/infer", infer_body(2.0)).status)
        described = others.ask(lambda c: c.get("/v2/models/slow").status)
        gate.open()
        assert [f.result() for f in (loaded, invoked, described)] == [200] * 3
    client.unload_model("slow")


_CLOSED = {
    "trace": ["trace/setting", "models/echo/trace/setting", "models/nobody/trace/setting"],
    "log": ["logging"],
    "shared_memory": [
        *(f"{kind}sharedmemory/status" for kind in ("system", "cuda")),
        *(f"systemsharedmemory/region/a%2Fb/{call}" for call in ("status", "register")),
        *("systemsharedmemory/unregister", "cudasharedmemory/region/x/unregister"),
    ],
}


@pytest.mark.parametrize(("needs", "path"), [(n, p) for n, ps in _CLOSED.items() for p in ps])
@rows("method", ["GET", "POST"])
def test_routes_beyond_a_model_need_a_setting(client, needs, path, method):
    reply = client.request(method, f"/v2/{path}", b"{}")
    assert refusal(reply)[:2] == (403, "NotPassedThrough")
    assert f"the setting passthrough lacks '{needs}'" in reply.error
