"""gRPC clients of other languages at both listeners: many callers that share one connection.

They are built where there is what builds them, and kept in pytest's cache for the next run.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builds import build, built
from tests.grpc_calls import infer_request
from tests.running import COMPLETE, embedded_adapter
from tests.trees import write_python_model

pytestmark = [pytest.mark.triton, pytest.mark.nightly, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
CALLERS, CALLS, SECONDS = 16, 50, 20
CANCELLER_CALLS = 200  # to be answered, of each caller
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
    return ["java", "-cp", path]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with embedded_adapter(f"--model-roots={root}", "--grpc-data=127.0.0.1:0", COMPLETE) as running:
        with running.client() as client:
            for name in MODELS:
                path = write_python_model(root / name.replace("/", "_"))
                client.load_model(name, path)
        yield running


@pytest.fixture
def client(request) -> list[str]:
    language = request.getfixturevalue(request.param)
    return [*language, "Client"] if request.param == "java" else language


@pytest.fixture
def canceller(request) -> tuple[list[str], list[str]]:
    """A command that gives up two thirds of its calls, and what it wants behind its arguments."""
    language, transport = request.param
    command = request.getfixturevalue(language)
    return ([*command, "Canceller"] if language == "java" else command), [transport]


@pytest.mark.parametrize(
    ("client", "listener", "model"),
    [
        ("go", "grpc", MODELS[0]),
        ("go", "grpc_data", MODELS[1]),
        ("java", "grpc_data", MODELS[0]),
    ],
    indirect=["client"],
)
def test_callers_on_one_connection_get_own_answers(client, adapter, listener, model, tmp_path):
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


@pytest.mark.parametrize("listener", ["grpc", "grpc_data", "Triton itself"])
@pytest.mark.parametrize(
    "canceller", [("go", "cancel"), ("java", "netty"), ("java", "okhttp")], indirect=True, ids=str
)
def test_given_up_calls_cost_no_other(canceller, adapter, listener, tmp_path):
    """They share one connection, as those of ModelMesh do, and cancels cross what is sent.

    The counts at Triton itself are printed to compare: grpc-okhttp sometimes loses a call there.
    """
    addresses = {**adapter.listeners, "Triton itself": adapter.grpc_address}
    command, last = canceller
    message = tmp_path / "request"
    message.write_bytes(infer_request(MODELS[0], *range(16)).SerializeToString())
    numbers = (str(CALLERS), str(CANCELLER_CALLS), str(SECONDS))
    counts = subprocess.run(
        [*command, addresses[listener], message, *numbers, *last],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout.split()
    sys.stdout.write(f"{' '.join(last)} at {listener}: {' '.join(counts)}\n")
    if listener in adapter.listeners:
        answered = CALLERS * CANCELLER_CALLS
        expected = {"OK": str(answered), "given_up": str(2 * answered)}
        assert dict(zip(counts[::2], counts[1::2], strict=True)) == expected
