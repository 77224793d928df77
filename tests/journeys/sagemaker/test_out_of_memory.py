"""507, and only for what is out of memory; freed memory is there for the next."""

from typing import Any

import pytest

from tests.asking import quoted, refusal
from tests.running import EXAMPLES, Reply
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = pytest.mark.triton

_FIGURES = ("needed_bytes", "free_bytes", "limit_bytes", "needs_more_than_bytes")
_MIB = 2**20
_TORCH = 'raise RuntimeError("Out of memory. Tried to allocate 2.00 GiB (3.00 GiB free)")'


def capacity(reply: Reply) -> dict[str, Any]:
    """The body of a 507, whose shape is checked."""
    body = reply.json()
    assert reply.status == 507, body
    assert body.keys() == {"error", "code", "model_name", "matched", "device", *_FIGURES}
    assert all(body[name] is None or body[name] >= 0 for name in _FIGURES)
    assert body["device"] == "host"
    return body


def test_load_out_of_memory_is_507_without_trace(client, adapter, package):
    """Another model is loaded: alone, no unload could make room for it."""
    write_python_model(package, initialize=_TORCH)
    client.load_model("other", EXAMPLES / "identity")

    body = capacity(client.load("big", package))

    assert (body["code"], body["model_name"]) == ("OutOfMemory", "big")
    assert body["matched"].lower() == "out of memory"
    assert body["needed_bytes"] == 2048 * _MIB
    assert 0 < body["free_bytes"] <= body["limit_bytes"]
    assert refusal(client.get("/models/big"))[0] == 404
    state = adapter.state()
    [model] = state["models"]
    folders = [path.name for path in adapter.repository.iterdir() if path.is_dir()]
    assert folders == [model["triton_name"]]
    book = state["memory"]["devices"]["host"]
    assert (book["reserved_bytes"], book["used_by_models_bytes"]) == (0, model["bytes"]["host"])


def test_load_without_others_that_lacks_memory_is_400(client, package):
    """Refuse it the second time before a try: no unload can give it more."""
    write_python_model(package, initialize="raise MemoryError")
    for _ in range(2):
        assert refusal(client.load("big", package)) == (400, "ModelTooLarge", "big")


def test_inference_out_of_memory_is_507_model_stays(client, package):
    name = "team/greedy"
    write_python_model(
        package,
        answer="""\
            if values[0] == 1:
                raise MemoryError
            if values[0] == 2:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        """,
    )
    client.load_model(name, package)
    path = f"/models/{quoted(name)}/invoke"

    plain = capacity(client.post(path, infer_body(1.0)))
    assert client.post(path, infer_body(0.0)).status == 200  # ends the row of failures
    cuda = client.post(path, infer_body(2.0)).json()

    assert (plain["code"], plain["model_name"], plain["matched"]) == (
        "OutOfMemory",
        name,
        "MemoryError",
    )
    assert plain["needed_bytes"] is None  # not what the loaded model takes
    assert cuda["matched"].lower().startswith("cuda out of memory")
    assert cuda["needed_bytes"] == 2048 * _MIB
    assert client.post(path, infer_body(0.0)).status == 200


def test_inference_is_507_without_figures_when_unseen(client, package):
    """It counts once in a row: nobody can say whether unloads of others have helped."""
    text = "CUDA out of memory. Tried to allocate 2.00 GiB"
    answer = f"if values[0]:\n    raise RuntimeError({text!r})"
    write_python_model(package, answer=answer)
    client.load_model("words", package)
    client.load_model("other", EXAMPLES / "identity")
    for _ in range(2):
        body = client.invoke("words").json()
        assert (body["code"], body["device"]) == ("OutOfMemory", None)
        assert (body["free_bytes"], body["limit_bytes"]) == (None, None)
        assert body["needed_bytes"] == 2048 * _MIB
        again = client.invoke("words")
        assert refusal(again) == (500, "InferenceFailed", "words")
        assert "its device is not measured" in again.error
        assert client.invoke("words", 0.0).status == 200


def test_callers_words_are_no_lack_of_memory(client, package):
    write_python_model(package, initialize='raise ValueError("no file named BLOOM-OOM.bin")')
    name = "CUDA out of memory"
    assert refusal(client.load(name, package)) == (400, "InvalidModel", name)

    write_python_model(package, config=CONFIG + f'"{name}"\n')
    assert refusal(client.load(name, package)) == (400, "InvalidModel", name)

    write_python_model(package, answer='raise ValueError("wrong word")')
    client.load_model(name, package)
    path = f"/models/{quoted(name)}/invoke"
    assert refusal(client.post(path, infer_body(1.0))) == (500, "InferenceFailed", name)
    for field in ("name", "datatype"):
        body = infer_body(1.0)
        body["inputs"][0][field] = name
        assert refusal(client.post(path, body)) == (400, "InvalidRequest", name)
    body = infer_body(1.0) | {"id": name, "outputs": [{"name": name}]}
    assert refusal(client.post(path, body)) == (400, "InvalidRequest", name)


def test_inference_beyond_the_device_is_507(client, adapter):
    def ask(mebibytes: int) -> Reply:
        tensor = {"name": "MIB", "datatype": "INT64", "shape": [1], "data": [mebibytes]}
        return client.post("/models/eater/invoke", {"inputs": [tensor]})

    client.load_model("eater", EXAMPLES / "hungry_infer")

    body = capacity(ask(4096))

    assert body["code"] == "OutOfMemory"
    assert body["needed_bytes"] == 4096 * _MIB
    assert "allocate" in body["matched"].lower() or "memory" in body["matched"].lower()
    assert ask(16).data == [16]
    assert refusal(ask(0)) == (400, "InvalidRequest", "eater")
