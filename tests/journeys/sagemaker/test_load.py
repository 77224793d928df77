"""POST /models."""

import pytest

from tests.asking import (
    background,
    model_names,
    refusal,
    triton_index,
)
from tests.cases import rows
from tests.running import EXAMPLES
from tests.trees import CONFIG, write_python_model

pytestmark = pytest.mark.triton


def test_second_load_of_loaded_model_is_conflict(client):
    client.load_model("echo", EXAMPLES / "identity")

    again = client.load("echo", EXAMPLES / "identity")
    elsewhere = client.load("echo", EXAMPLES / "digits")

    assert refusal(again) == refusal(elsewhere) == (409, "AlreadyLoaded", "echo")
    assert client.get("/models/echo").json()["modelUrl"] == str(EXAMPLES / "identity")


def test_racing_loads_of_a_name_agree_finally(adapter, client):
    with background(adapter) as others:
        loads = [others.ask(lambda c: c.load("echo", EXAMPLES / "identity")) for _ in range(6)]
        statuses = sorted(each.result().status for each in loads)
        deletes = [others.ask(lambda c: c.unload("echo")) for _ in range(4)]
        gone = sorted(each.result().status for each in deletes)

    assert statuses == [200, 409, 409, 409, 409, 409]
    assert gone == [200, 404, 404, 404]
    with adapter.client() as other:
        assert other.get("/models").json() == {"models": []}
    assert list(adapter.repository.iterdir()) == []


def test_loading_model_is_taken_but_absent(client, adapter, package, gate):
    write_python_model(package, initialize=gate.statements)
    with background(adapter) as others:
        loading = others.ask(lambda c: c.load("slow", package))
        gate.wait_reached()

        assert refusal(client.load("slow", package)) == (409, "AlreadyLoaded", "slow")
        assert refusal(client.get("/models/slow")) == (503, "ModelNotReady", "slow")
        invoked = client.invoke("slow")
        assert refusal(invoked) == (503, "ModelNotReady", "slow")
        assert client.get("/models").json() == {"models": []}

        gate.open()
        assert loading.result().status == 200
    assert model_names(client) == ["slow"]


def test_model_url_is_told_as_it_was_given(client, adapter, package):
    write_python_model(package / "of hash" / "model")
    folder = f"{package}/of hash"
    urls = {
        "nested": f"{folder}/",
        "slash": f"{folder}/model/",
        "dots": f"{folder}/../of hash//model",
        "file": f"file://{folder.replace(' ', '%20')}/model",
    }

    with background(adapter) as others:
        loads = {n: others.ask(lambda c, n=n, u=u: c.load(n, u)) for n, u in urls.items()}
        replies = {name: load.result() for name, load in loads.items()}

    described = [{"modelName": n, "modelUrl": u} for n, u in sorted(urls.items())]
    assert [replies[n].json() for n in sorted(urls)] == described
    assert [client.get(f"/models/{n}").json() for n in sorted(urls)] == described
    assert client.get("/models").json() == {"models": described}


@rows("url", ["/etc", "/etc/no-such-thing", "relative", "s3://bucket/x", "/", "{}/../../../etc"])
def test_a_path_outside_the_model_roots_is_refused(client, model_root, url):
    assert refusal(client.load("echo", url.format(model_root)))[:2] == (400, "InvalidRequest")


def test_link_out_of_the_model_roots_is_refused(client, package, tmp_path):
    outside = write_python_model(tmp_path / "outside")
    (package / "link").symlink_to(outside)
    write_python_model(package / "inner")
    (package / "inner" / "weights").symlink_to("/etc/hostname")

    assert refusal(client.load("echo", package / "link"))[:2] == (400, "InvalidRequest")
    assert refusal(client.load("echo", package / "inner"))[0] == 400
    assert client.get("/models").json() == {"models": []}


def test_broken_config_is_refused_with_its_place(client, package):
    write_python_model(package, config=CONFIG + "max_batch_size: many\n")

    reply = client.load("echo", package)

    assert refusal(reply)[:2] == (400, "InvalidModel")
    assert f"{package}/config.pbtxt:5:" in reply.error
    assert "many" in reply.error


def test_raising_model_is_refused_and_leaves_nothing(client, adapter, package):
    write_python_model(package, initialize='raise ValueError("the weights are of 1999")')

    failed = client.load("echo", package)

    assert refusal(failed) == (400, "InvalidModel", "echo")
    assert "the weights are of 1999" in failed.error
    assert refusal(client.get("/models/echo"))[0] == 404
    assert list(adapter.repository.iterdir()) == []
    assert triton_index(adapter).get("echo", "UNAVAILABLE") != "READY"

    write_python_model(package)
    client.load_model("echo", package)


_NO_LOADS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'""',
    b"\xff\xfe",
    b"{}",
    b'{"model_name": "echo"}',
    b'{"url": "/models/x"}',
    b'{"model_name": "echo", "url": "/models/x",}',  # as printed in AWS's own contract
    b'{"model_name": 7, "url": "/models/x"}',
    b'{"model_name": null, "url": "/models/x"}',
    b'{"model_name": "", "url": "/models/x"}',
    b'{"model_name": "a\\u0000b", "url": "/models/x"}',
    b'{"model_name": "\\ud800", "url": "/models/x"}',
    b'{"model_name": "echo", "url": ""}',
    b'{"model_name": "echo", "url": 7}',
    b'{"model_name": "echo", "url": ["/models/x"]}',
    b'{"model_name": "echo", "url": "/models/\\u0000"}',
    b'{"model_name": "echo", "url": "/models/\\udcff"}',
    b"[" * 100_000,
]


@rows("body", _NO_LOADS)
def test_what_is_no_load_is_refused(client, body):
    assert refusal(client.post("/models", body))[:2] == (400, "InvalidRequest")


def test_unknown_fields_and_headers_are_ignored(client):
    body = {"model_name": "echo", "url": str(EXAMPLES / "identity"), "extra": [1], "Url": "/etc"}
    headers = {"Content-Type": "text/csv", "X-Amzn-Unheard-Of": "1", "Accept": "image/png"}

    assert client.post("/models", body, headers).status == 200


def test_headers_of_the_platform_are_logged(client, adapter):
    headers = {
        "X-Amzn-SageMaker-Target-Model": "team/a.tar.gz",
        "X-Amzn-SageMaker-Inference-Id": "id-77",
        "X-Amzn-SageMaker-Custom-Attributes": "colour=blue",
    }
    url = str(EXAMPLES / "identity")

    loaded = client.post("/models", {"model_name": "targeted", "url": url}, headers)

    line = adapter.wait_for("model.loaded", model_id="targeted")
    assert (line["target_model"], line["inference_id"]) == ("team/a.tar.gz", "id-77")
    assert line["custom_attributes"] == "colour=blue"
    assert loaded.headers["X-Amzn-SageMaker-Inference-Id"] == "id-77"
    assert client.request("DELETE", "/models/targeted", headers=headers).status == 200
    line = adapter.wait_for("model.unloaded", model_id="targeted")
    assert line["target_model"] == "team/a.tar.gz"


@pytest.mark.of_triton("2.51", "2.73", "its words for a failed load")
def test_refused_load_says_what_was_odd(client, package):
    """Triton itself names neither file nor line of a field that it does not know."""
    write_python_model(package, config=CONFIG + "colour: 3\n")

    body = client.load("odd", package).json()

    assert body["code"] == "InvalidModel"
    assert "failed to poll from model repository" in body["error"]
    line = len(CONFIG.splitlines()) + 1
    assert f"config.pbtxt:{line}" in body["error"]
    assert "colour" in body["error"]
