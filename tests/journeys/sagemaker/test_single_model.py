"""--single-model: one package, loaded at start and served at /invocations."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.asking import BINARY, Gate, binary_request, refusal, sized
from tests.running import COMPLETE, EMBEDDED, EXAMPLES, Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton


def test_the_single_model_is_served_at_invocations() -> None:
    with (
        embedded_adapter(f"--single-model={EXAMPLES / 'identity'}", COMPLETE) as adapter,
        closing(adapter.client()) as client,
    ):
        assert client.get("/ping").status == 200
        invoked = client.post("/invocations", infer_body(1.5))
        assert invoked.json()["outputs"][0]["data"] == [1.5]
        assert invoked.json()["model_name"] == "identity"
        body, json_bytes = binary_request(4)
        raw = client.post("/invocations", body, sized(json_bytes))
        assert raw.headers["Content-Type"].startswith(BINARY)
        assert raw.body.endswith(body[json_bytes:])
        assert refusal(client.post("/invocations", b"{"))[0] == 400
        assert refusal(client.post("/invocations", b""))[:2] == (400, "InvalidRequest")
        assert client.get("/models").json()["models"][0]["modelName"] == "identity"
        assert refusal(client.get("/invocations"))[0] == 405


_CALLS = """
call = pb_utils.InferenceRequest(
    model_name={name},
    requested_output_names=["OUT"],
    inputs=[pb_utils.Tensor("IN", values)],
)
reply = call.exec()
if reply.has_error():
    raise pb_utils.TritonModelException(reply.error().message())
values = pb_utils.get_output_tensor_by_name(reply, "OUT").as_numpy()
"""


def ensemble_of(*steps: str) -> str:
    """Return the config of an ensemble that passes IN through the steps to OUT."""
    tensors = ["IN", *(f"after_{step}" for step in steps[:-1]), "OUT"]
    texts = [
        f'step {{ model_name: "{step}" model_version: -1'
        f' input_map {{ key: "IN" value: "{tensors[number]}" }}'
        f' output_map {{ key: "OUT" value: "{tensors[number + 1]}" }} }}'
        for number, step in enumerate(steps)
    ]
    return f"""
        platform: "ensemble"
        input [{{ name: "IN" data_type: TYPE_FP32 dims: [-1] }}]
        output [{{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }}]
        ensemble_scheduling {{ {" ".join(texts)} }}
    """


@pytest.mark.parametrize(
    ("entry", "helpers", "answer"),
    [
        ("whole", "", 11.0),
        ("calls", "", 3.0),
        ("composes", "add", 3.0),
        ("add", "", 3.0),
    ],
)
def test_a_single_model_has_the_models_beside_it(
    tmp_path: Path, entry: str, helpers: str, answer: float
) -> None:
    """Of a repository as SageMaker unpacks it: an ensemble of three steps, code that calls another
    model, code that composes the name of one, and one of several. Callers see the entry alone.
    """
    write_python_model(tmp_path / "add", answer="values = values + 1")
    write_python_model(tmp_path / "double", answer="values = values * 2")
    whole = write_python_model(tmp_path / "whole", config=ensemble_of("add", "double", "inner"))
    (whole / "1" / "model.py").unlink()
    inner = write_python_model(tmp_path / "inner", config=ensemble_of("double", "add"))
    (inner / "1" / "model.py").unlink()
    write_python_model(tmp_path / "calls", answer=_CALLS.format(name="'add'"))
    write_python_model(tmp_path / "composes", answer=_CALLS.format(name="'a' + 'dd'"))
    write_python_model(tmp_path / "broken", initialize="raise ValueError")
    value = {"whole": 1.5, "calls": 2.0, "composes": 2.0, "add": 2.0}[entry]
    single = ":".join(filter(None, (str(tmp_path / entry), helpers)))
    with (
        embedded_adapter(f"--single-model={single}", COMPLETE) as adapter,
        closing(adapter.client()) as client,
    ):
        assert client.get("/ping").status == 200
        invoked = client.post("/invocations", infer_body(value))
        assert invoked.json()["outputs"][0]["data"] == [answer]
        assert invoked.json()["model_name"] == entry
        of_v2 = client.post(f"/v2/models/{entry}/infer", infer_body(value))
        assert of_v2.json()["outputs"][0]["data"] == [answer]
        assert [each["modelName"] for each in client.get("/models").json()["models"]] == [entry]
        for other in {"add", "double", "inner", "calls"} - {entry}:
            asked = client.post(f"/v2/models/{other}/infer", infer_body(1.0))
            assert refusal(asked)[0] == 404, other


def test_ping_is_503_until_the_single_model_is_loaded(tmp_path: Path, gate: Gate) -> None:
    folder = write_python_model(tmp_path / "a b", initialize=gate.statements)
    adapter = RunningAdapter(*EMBEDDED, f"--single-model={folder}")
    try:
        adapter.wait_for("adapter.listening", listener="http")
        with closing(adapter.client()) as client, closing(Client(adapter.admin)) as admin:
            gate.wait_reached()
            assert client.get("/ping").status == 503
            assert admin.get("/livez").status == 200
            assert "loading" in admin.get("/readyz").json()["reason"]
            assert client.post("/invocations", infer_body(1.0)).status == 503

            gate.open()
            adapter.wait_for("adapter.started")
            assert client.get("/ping").status == 200
            assert client.post("/invocations", infer_body(1.0)).json()["model_name"] == "a b"
    finally:
        gate.open()
        assert adapter.stop() == 0


def test_a_single_model_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    folder = write_python_model(tmp_path / "bad", initialize='raise ValueError("no weights")')
    adapter = RunningAdapter(*EMBEDDED, f"--single-model={folder}")

    adapter.process.wait(60)

    assert adapter.stop() == 1
    assert "no weights" in adapter.errors
    assert "Traceback" not in adapter.errors
