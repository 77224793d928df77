"""`triton-adapter list` and `show` before a folder, before a bucket, and without a store."""

import json
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.buckets import Bucket, s3_server
from tests.grpc_calls import write_decoupled_model
from tests.journeys.client.terminal import run
from tests.journeys.endpoint.folder_store import Store
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton


def list_models(environ: dict[str, str], *argv: str) -> dict[str, dict[str, Any]]:
    """Return the models by name, in the order of the list."""
    listed = run("list", *argv, "--json", environ=environ)
    assert listed.returncode == 0, listed.stderr
    return {model["name"]: model for model in map(json.loads, listed.stdout.splitlines())}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Iterator[RunningAdapter]:
    folder = tmp_path_factory.mktemp("store")
    store = Store(folder)
    for name in ("called.tar.gz", "team-a/idle.tar.gz"):
        store.put(name, 1)
    store.put("broken.tar.gz", 1, initialize="raise ValueError('weights are missing')")
    write_python_model(folder / "folder")
    (folder / "README.md").write_text("not a model")
    flags = (f"--model-store={folder}", f"--cache-dir={tmp_path_factory.mktemp('cache')}")
    with embedded_adapter(*flags, "--on-demand", "--pin=team-*", COMPLETE) as adapter:
        with adapter.client() as client:
            path = "/v2/models/{}/infer"
            assert client.post(path.format("called.tar.gz"), infer_body(0.0)).status == 200
            assert client.post(path.format("broken.tar.gz"), infer_body(0.0)).status >= 400
        yield adapter


@pytest.fixture
def environ(adapter) -> dict[str, str]:
    return {"ADAPTER_HTTP": adapter.http, "ADAPTER_ADMIN": adapter.admin}


def test_list_has_places_sizes_and_failures(environ):
    models = list_models(environ)

    assert list(models) == ["broken.tar.gz", "called.tar.gz", "folder", "team-a/idle.tar.gz"]
    called = models["called.tar.gz"]
    assert (called["where"], called["state"]) == ("memory", "READY")
    assert called["memory_bytes"] > 0
    assert called["disk_bytes"] > 0
    assert called["last_used"] is not None
    broken = models["broken.tar.gz"]
    assert broken["where"] == "disk"
    assert "weights are missing" in broken["reason"]
    idle = models["team-a/idle.tar.gz"]
    assert (idle["where"], idle["last_used"], idle["is_pinned"]) == ("store", None, True)
    assert models["folder"]["package_bytes"] > 0


def test_slash_before_a_key_names_no_model(adapter):
    """The store without a name is no first part of a name: the model would be loaded twice."""
    with adapter.client() as client:
        reply = client.post("/v2/models/%2Fcalled.tar.gz/infer", infer_body(0.0))
    with Client(adapter.admin) as admin:
        shown = admin.get("/store/models?name=%2Fcalled.tar.gz")

    assert (reply.status, shown.status) == (404, 404)


def test_list_prints_a_table(environ):
    listed = run("list", environ=environ)

    title, broken, called, *_ = listed.stdout.decode().splitlines()
    assert title.split()[:3] == ["NAME", "WHERE", "PACKAGE"]
    assert "failed: " in broken
    error, _, hint = broken.partition("ValueError: weights are missing")
    assert error
    assert hint == " (`triton-adapter show broken.tar.gz` has all of it)"
    assert "in memory" in called
    assert listed.stderr == b""


def test_list_takes_a_filter_and_a_limit(environ):
    assert list(list_models(environ, "team-a/*")) == ["team-a/idle.tar.gz"]
    assert list(list_models(environ, "FOLD")) == ["folder"]

    first = run("list", "--limit=2", environ=environ)

    [more] = first.stderr.decode().splitlines()
    [after] = [word for word in shlex.split(more) if word.startswith("--after=")]
    assert list(list_models(environ, after)) == ["folder", "team-a/idle.tar.gz"]


def test_list_says_that_no_model_matches(environ):
    listed = run("list", "nobody", environ=environ)

    assert (listed.returncode, listed.stdout) == (0, b"")
    assert b"no store has such a model" in listed.stderr


def test_show_has_a_line_that_calls_the_model(environ):
    shown = run("show", "called.tar.gz", environ=environ)

    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.decode().splitlines()
    facts = {line.split()[0]: line for line in lines if line}
    assert "in memory" in facts["where"]
    assert "FP32" in facts["inputs"]
    called = subprocess.run(
        [*shlex.split(lines[-1]), "--silent", "--fail"], capture_output=True, check=True
    )
    assert json.loads(called.stdout)["outputs"]


def test_show_says_that_the_size_was_measured(environ):
    """It agrees with `ps`: what the load had guessed from the files is no longer the size."""
    shown = run("show", "called.tar.gz", environ=environ)
    listed = run("ps", "--json", environ=environ)

    [memory] = [line for line in shown.stdout.decode().splitlines() if line.startswith("memory")]
    models = {model["model_id"]: model for model in json.loads(listed.stdout)["models"]}
    assert models["called.tar.gz"]["basis"] == "measured"
    assert memory.endswith("(measured)")


def test_show_has_a_model_of_the_store(environ):
    shown = run("show", "team-a/idle", "--json", environ=environ)

    model = json.loads(shown.stdout)
    assert (model["key"], model["where"]) == ("team-a/idle.tar.gz", "store")
    assert model["example"].endswith("/v2/models/team-a%2Fidle/infer --data @REQUEST.json")


def test_show_of_unknown_name_gives_advice(environ):
    shown = run("show", "nobody", environ=environ)

    assert shown.returncode == 1
    assert b"no model 'nobody' is loaded, and no store has it" in shown.stderr
    assert b"triton-adapter list" in shown.stderr


def test_index_of_the_store_has_unloaded_models(adapter):
    """It names them as Triton's index does those of its repository."""
    with adapter.client() as client:
        path = "/v2/repository/index"
        entries = client.post(path, {"repository_name": "store"}).json()
        ours = client.post(path).json()
        ready = client.post(path, {"repository_name": "store", "ready": True}).json()
        refused = client.post(path, {"repository_name": "other"})

    states = {entry["name"]: (entry["state"], entry["reason"]) for entry in entries}
    assert states == {
        "called.tar.gz": ("READY", ""),
        **dict.fromkeys(
            ("broken.tar.gz", "folder", "team-a/idle.tar.gz"), ("UNAVAILABLE", "unloaded")
        ),
    }
    assert [entry["name"] for entry in ours] == ["called.tar.gz"]
    assert ready == ours
    assert (refused.status, "repository_name" in refused.error) == (400, True)


def test_grpc_index_of_the_store_has_unloaded_models(adapter):
    with grpc.insecure_channel(adapter.grpc) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")
        message = pb.RepositoryIndexRequest(repository_name="store").SerializeToString()
        answer = pb.RepositoryIndexResponse.FromString(ask(message, timeout=60))

    assert len(answer.models) == 4


@pytest.mark.parametrize(
    ("query", "status", "reason"),
    [
        ("limit=0", 400, "from 1 to 1000"),
        ("limit=x", 400, "from 1 to 1000"),
        ("after=x", 400, "only what an answer has"),
        ("store=other", 404, "there is no store 'other'"),
        ("name=a//b", 404, "no store has it"),
        ("name=", 404, "no store has it"),
    ],
)
def test_admin_refuses_odd_queries(adapter, query, status, reason):
    with Client(adapter.admin) as admin:
        reply = admin.get(f"/store/models?{query}")

    assert (reply.status, reason in reply.error) == (status, True), reply.body


def test_list_before_a_bucket_and_endpoints(tmp_path):
    """A deleted object is not listed any more unless it is loaded, and an endpoint's models have
    its name.
    """
    package = write_python_model(tmp_path / "m")
    with s3_server() as endpoint:
        bucket = Bucket(endpoint, "models")
        bucket.put_model("digits.tar.gz", package)
        bucket.put_model("loaded.tar.gz", package)
        bucket.put_model("team-a/folder", package)
        flags = (
            "--model-store=s3://models/models",
            "--endpoints=team=s3://models/models/team-a",
            f"--cache-dir={tmp_path / 'cache'}",
            "--on-demand",
            COMPLETE,
        )
        with embedded_adapter(*flags, environ=bucket.environ) as adapter:
            environ = {"ADAPTER_ADMIN": adapter.admin, "ADAPTER_HTTP": adapter.http}
            names = ["digits.tar.gz", "loaded.tar.gz", "team-a/folder", "team/folder"]
            assert list(list_models(environ)) == names
            assert list(list_models(environ, "--store=team", "--limit=1")) == ["team/folder"]
            with adapter.client() as client:
                for name in ("team%2Ffolder", "loaded.tar.gz"):
                    reply = client.post(f"/v2/models/{name}/infer", infer_body(0.0))
                    assert reply.status == 200
            assert list_models(environ)["team/folder"]["where"] == "memory"
            bucket.delete("models/digits.tar.gz")
            bucket.delete("models/loaded.tar.gz")
            models = list_models(environ)
            assert list(models) == names[1:]
            assert [models[name]["is_outdated"] for name in names[1:]] == [True, False, False]


def test_line_of_show_calls_a_model_that_left(tmp_path):
    """Without on_demand only the endpoint loads a model: a line of V2 would be 404 by then."""
    write_python_model(tmp_path / "store" / "m")
    flags = (f"--model-store={tmp_path / 'store'}", f"--cache-dir={tmp_path / 'cache'}")
    with embedded_adapter(*flags, COMPLETE) as adapter:
        environ = {"ADAPTER_ADMIN": adapter.admin, "ADAPTER_HTTP": adapter.http}
        with adapter.client() as client:
            assert client.call_endpoint("m").status == 200
            example = json.loads(run("show", "m", "--json", environ=environ).stdout)["example"]
            client.unload_model("m")

        called = subprocess.run(
            [*shlex.split(example), "--silent", "--fail"], capture_output=True, check=True
        )

    assert json.loads(called.stdout)["outputs"]


@pytest.mark.parametrize("flags", [(), ("--on-demand",)])
def test_line_of_show_calls_decoupled_model(tmp_path, flags):
    write_decoupled_model(tmp_path / "store" / "m", answer="send(values); send(2 * values)")
    store = (f"--model-store={tmp_path / 'store'}", f"--cache-dir={tmp_path / 'cache'}")
    with embedded_adapter(*store, *flags, COMPLETE) as adapter:
        environ = {"ADAPTER_ADMIN": adapter.admin, "ADAPTER_HTTP": adapter.http}
        with adapter.client() as client:
            client.call_endpoint("m")
        example = json.loads(run("show", "m", "--json", environ=environ).stdout)["example"]

        called = subprocess.run(
            [*shlex.split(example), "--silent", "--fail"], capture_output=True, check=True
        )

    assert called.stdout.count(b"OUT") == 2


def test_list_without_a_store_is_refused(tmp_path):
    package = write_python_model(tmp_path / "m")
    with embedded_adapter(f"--model-roots={tmp_path}", COMPLETE) as adapter:
        environ = {"ADAPTER_ADMIN": adapter.admin, "ADAPTER_HTTP": adapter.http}
        listed = run("list", environ=environ)
        assert (listed.returncode, b"model_store" in listed.stderr) == (1, True)
        assert b"is not the listener" not in listed.stderr
        with adapter.client() as client:
            client.load("m", package)
        shown = run("show", "m", environ=environ)
        assert b"in memory" in shown.stdout
