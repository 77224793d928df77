"""What the chart runs and prints works on a Triton and an adapter started as it starts them."""

import json
import re
import shlex
import subprocess
import sys

import grpc
import pytest

from tests.cases import rows
from tests.chart.chart import NOTES, only, render, values_of, variables
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
def test_containers_start_with_the_charts_arguments(
    pod: RunningAdapter,
):
    assert pod.started["triton"] == "external"
    assert pod.state()["memory"]["devices"]["memory"]["limit_bytes"] == 6 * 2**30


@pytest.mark.triton
def test_notes_curl_lines_can_be_pasted(pod: RunningAdapter):
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
def test_notes_grpcurl_lines_can_be_pasted(pod: RunningAdapter):
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
def test_loads_want_the_secrets_token_helm_test_has(tmp_path):
    values = values_of("cpu") | {"adapter": {"controlToken": {"existingSecret": "s", "key": "k"}}}
    [call] = only("Pod", values)["spec"]["containers"]
    script, _, mounted = call["args"]
    assert variables(values)["ADAPTER_CONTROL_TOKEN"] == f"file:{mounted}"
    file = tmp_path / "token"
    file.write_text("the-token-of-the-secret\n")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    with running_pod(values, environ={"ADAPTER_CONTROL_TOKEN": f"file:{file}"}) as pod:
        without = run(f"http://{pod.http}")
        brought = run(f"http://{pod.http}", str(file))

    assert "was answered with 401" in without.stderr
    assert (brought.returncode, brought.stderr) == (0, ""), brought.stdout
    assert "the-token" not in brought.stdout


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


def words_of(values: dict) -> list[list[str]]:
    return [shlex.split(line) for line in lines(render(values)[NOTES], "(?:kubectl|helm)")]


@pytest.mark.parametrize("name", ["default", "names", "settings", "serving-runtime"])
def test_kubectl_and_helm_lines_name_real_objects(name):
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


def test_notes_wait_as_long_as_the_deployment():
    """`--wait` of Helm and `rollout status` give up after times of their own."""
    for values in ({}, {"progressDeadlineSeconds": 77}):
        seconds = only("Deployment", values)["spec"]["progressDeadlineSeconds"]
        assert (
            f"rollout status deployment/demo-triton-adapter --timeout {seconds}s"
            in (render(values)[NOTES])
        )


SECRET = {"adapter": {"controlToken": {"existingSecret": "s", "key": "k"}}}
BUDGET = {"pdb": {"enabled": True, "minAvailable": 1}}
MONITORED = {"metrics": {"podMonitor": {"enabled": True}}, "checkApis": False}
CLAIM = {"endpoint": {"cache": {"type": "existingClaim", "existingClaim": "c"}}}


@rows(
    ("values", "text"),
    [
        (values_of("default"), "nothing fills it"),
        (values_of("network-policy-open"), "do not authenticate callers"),
        (values_of("placement"), "each pod has its own models"),
        ({}, " names no registry"),
        (BUDGET, "blocks node drains"),
        # neither the Secret's length nor the owner of a volume is seen
        (SECRET, "The token of the secret s needs 16 characters or more"),
        (
            {"settings": {"model_store": "s3://b"}, **CLAIM},
            "The claim c must be writable for user 65532.",
        ),
        ({}, "run code: the pods of the namespace serving."),
        (
            {"networkPolicy": {"management": [{"podSelector": {}}]}},
            "run code: the peers of networkPolicy.man",
        ),
        ({"networkPolicy": {"open": True}}, "WARNING: everybody who reaches"),
        ({"networkPolicy": {"enabled": False}}, "WARNING: everybody who reaches"),
        (MONITORED, "may scrape"),
        (values_of("default"), "Pods: 1, GPUs in all: 1."),
        (values_of("placement"), "Pods: 3, GPUs in all: 6."),
        (values_of("keda"), "Pods: up to 4, GPUs in all: 4."),
        (values_of("single"), "and a Triton in one container. Pods: 1, GPUs in all: 1."),
        (values_of("triton-elsewhere"), "Triton at triton.serving.svc. Pods: 1, GPUs in all: 0."),
        (values_of("endpoint"), "X-Amzn-SageMaker-Target-Model: KEY"),
        (values_of("endpoint-keys"), "must be signed"),
    ],
)
def test_notes_say_what_values_mean(values, text):
    assert text in render(values)[NOTES]


@rows(
    ("values", "text"),
    [
        (values_of("pvc"), "nothing fills it"),
        (values_of("endpoint"), "nothing fills it"),
        ({"image": {"registry": "r"}}, "names no registry"),
        ({"global": {"imageRegistry": "r"}}, "names no registry"),
        ({**BUDGET, "replicaCount": 2}, "node drains"),
        ({"pdb": {"enabled": True}}, "node drains"),
        ({}, "16 characters"),
        ({}, "must be writable"),
        ({**MONITORED, "networkPolicy": {"open": True}}, "may scrape"),
        (values_of("monitoring"), "may scrape"),
    ],
)
def test_notes_warn_of_nothing_that_is_well(values, text):
    assert text not in render(values)[NOTES]
