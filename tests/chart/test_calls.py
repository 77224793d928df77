"""What the chart runs and prints works on a Triton and an adapter started as it starts them."""

import json
import re
import shlex
import subprocess
import sys

import grpc
import helm_python as helm
import pytest

from tests.chart.chart import CHART, NOTES, only, render, values_of
from tests.chart.pod import running_pod
from tests.grpcurl import Grpcurl
from tests.running import EXAMPLES, RunningAdapter


@pytest.fixture(scope="module")
def pod():
    with running_pod(values_of("cpu")) as running:
        yield running


def lines(text: str, command: str) -> list[str]:
    return re.findall(rf"^  ({command} .*)$", text, re.MULTILINE)


@pytest.mark.triton
def test_triton_and_adapter_start_with_the_arguments_and_settings_of_the_chart(
    pod: RunningAdapter,
):
    assert pod.started["triton"] == "external"
    assert pod.state()["memory"]["devices"]["memory"]["limit_bytes"] == 6 * 2**30


@pytest.mark.triton
def test_the_curl_lines_of_the_notes_can_be_pasted(pod: RunningAdapter):
    text = render(values_of("cpu"))[NOTES]
    curls = [
        line.replace("127.0.0.1:8080", pod.http).replace("/opt/ml/models", str(EXAMPLES))
        for line in lines(text, "curl")
    ]

    load, listed, invoked, unloaded = (
        json.loads(subprocess.check_output(["sh", "-c", line], timeout=60)) for line in curls
    )

    assert load["modelName"] == "identity"
    assert [model["modelName"] for model in listed["models"]] == ["identity"]
    assert invoked["outputs"][0]["data"] == [1.0, 2.5]
    assert unloaded == {"modelName": "identity"}


@pytest.mark.triton
def test_the_grpcurl_lines_of_the_notes_can_be_pasted(pod: RunningAdapter):
    text = render(values_of("cpu"))[NOTES]
    words = [shlex.split(line)[1:] for line in lines(text, "grpcurl")]
    assert {line[-2] for line in words} == {"127.0.0.1:8085"}

    with grpc.insecure_channel(pod.grpc) as channel:
        health, index = (Grpcurl(channel).run(line) for line in words)

    assert health == {"status": "SERVING"}
    assert index == {}


@pytest.mark.triton
def test_the_helm_test_waits_loads_calls_and_unloads(pod: RunningAdapter):
    spec = only("Pod", values_of("cpu"))["spec"]
    [wait], [call] = spec["initContainers"], spec["containers"]
    service = f"{only('Service', {})['metadata']['name']}:8080"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        here = [word.replace(service, pod.http) for word in words]
        return subprocess.run(here, capture_output=True, text=True, timeout=60, check=False)

    waited = run(sys.executable, "-m", "adapter", *wait["args"])
    assert call["command"] == ["python3", "-c"]
    called = run(sys.executable, "-c", *call["args"])

    assert (waited.returncode, waited.stderr) == (0, "")
    assert (called.returncode, called.stderr) == (0, ""), called.stdout
    assert [line.partition(": ")[0] for line in called.stdout.splitlines()] == [
        "POST /v2/repository/models/helm-test/load",
        "POST /models/helm-test/invoke",
        "DELETE /models/helm-test",
    ]
    assert pod.state()["models"] == []


@pytest.mark.triton
def test_the_helm_test_fails_where_a_call_fails(pod: RunningAdapter):
    [call] = only("Pod", {})["spec"]["containers"]
    script = call["args"][0].replace("/invoke", "/invent")

    done = subprocess.run(
        [sys.executable, "-c", script, f"http://{pod.http}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert "POST /models/helm-test/invent was answered with 4" in done.stderr


def test_the_script_of_the_helm_test_is_the_file_of_the_chart():
    [call] = only("Pod", {})["spec"]["containers"]

    assert call["args"][0].strip() == (CHART / "files" / "call.py").read_text().strip()


def test_an_install_that_is_tried_without_a_cluster_shows_notes_and_objects():
    with helm.Config(storage_driver="memory", kube_apiserver="http://127.0.0.1:1") as config:
        release = config.install(CHART, "demo", {}, dry_run="client")

    assert "kubectl --namespace default rollout status deployment/demo" in json.dumps(release)
    assert "kind: Deployment" in release["manifest"]


def words_of(values: dict) -> list[list[str]]:
    return [shlex.split(line) for line in lines(render(values)[NOTES], "(?:kubectl|helm)")]


@pytest.mark.parametrize("name", ["default", "names", "settings", "serving-runtime"])
def test_the_kubectl_and_helm_lines_name_what_there_is(name):
    values = values_of(name)
    made = {f"{kind.lower()}/{only(kind, values)['metadata']['name']}" for kind in kinds(values)}

    named = {
        word
        for words in words_of(values)
        for word in words
        if word.startswith(("deployment/", "service/", "clusterservingruntime/"))
    }

    assert words_of(values)
    assert named <= made


def kinds(values: dict) -> list[str]:
    return ["ClusterServingRuntime"] if "mode" in values else ["Deployment", "Service"]


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("default", "nothing fills it"),
        ("default", "ask nobody who they are"),
        ("placement", "each pod has models of its own"),
    ],
)
def test_the_notes_warn(name, warning):
    assert warning in render(values_of(name))[NOTES]


def test_the_notes_warn_of_memory_that_nobody_measures():
    without = {"triton": {"gpu": {"count": 0}}}

    assert "nothing measures memory" in render(without)[NOTES]
    assert "nothing measures memory" not in render(values_of("cpu"))[NOTES]
    assert "nothing fills it" not in render(values_of("pvc"))[NOTES]
    assert "ask nobody" not in render(values_of("network-policy"))[NOTES]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("default", "Pods: 1, GPUs in all: 1."),
        ("placement", "Pods: 3, GPUs in all: 6."),
        ("keda", "Pods: up to 4, GPUs in all: 4."),
    ],
)
def test_the_notes_add_up_the_gpus(name, counts):
    assert counts in render(values_of(name))[NOTES]
