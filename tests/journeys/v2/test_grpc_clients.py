"""gRPC clients of other languages at both listeners: many callers that share one connection.

They are built where there is what builds them, and kept in pytest's cache for the next run.
"""

import os
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.builds import build, built
from tests.grpc_calls import infer_request
from tests.running import COMPLETE, embedded_adapter
from tests.trees import write_python_model

pytestmark = [pytest.mark.triton, pytest.mark.nightly, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
CALLERS, CALLS, SECONDS = 16, 50, 20
MODELS = ("m", "team/a")


@pytest.fixture(scope="module")
def go(pytestconfig) -> list[str]:
    source = HERE / "go_client"
    folder, is_built = built(pytestconfig, source, "go")
    if not is_built:
        build(folder, source, "go", "build", "-o", str(folder / "client"), ".")
    return [str(folder / "client")]


@pytest.fixture(scope="module")
def java(pytestconfig) -> list[str]:
    source = HERE / "java_client"
    folder, is_built = built(pytestconfig, source, "java", "mvn")
    if not is_built:
        copy = folder / "source"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        build(folder, copy, "mvn", "-q", "-B", "package", "dependency:copy-dependencies")
    target = folder / "source" / "target"
    path = os.pathsep.join([str(target / "classes"), str(target / "dependency" / "*")])
    return ["java", "-cp", path, "Client"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with embedded_adapter(f"--model-roots={root}", "--grpc-data=127.0.0.1:0", COMPLETE) as running:
        with closing(running.client()) as client:
            for name in MODELS:
                path = write_python_model(root / name.replace("/", "_"))
                assert client.load(name, path).status == 200
        yield running


@pytest.fixture
def client(request) -> list[str]:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    ("client", "listener", "model"),
    [
        ("go", "grpc", MODELS[0]),
        ("go", "grpc_data", MODELS[1]),
        ("java", "grpc_data", MODELS[0]),
    ],
    indirect=["client"],
)
def test_many_callers_on_one_connection_all_get_their_own_answers(
    client, adapter, listener, model, tmp_path
):
    message = tmp_path / "request"
    message.write_bytes(infer_request(model, *range(16)).SerializeToString())
    counts = subprocess.run(
        [*client, adapter.listeners[listener], message, str(CALLERS), str(CALLS), str(SECONDS)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout.split()
    assert dict(zip(counts[::2], counts[1::2], strict=True)) == {"OK": str(CALLERS * CALLS)}
