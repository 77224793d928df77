"""KServe's TrainedModels: examples/kserve as processes, and its agent, played."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.journeys.neighbours.agent import Agent
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "kserve"
MODELS = "/mnt/models"  # where KServe mounts them


@pytest.fixture(scope="module")
def container() -> dict:
    spec = yaml.safe_load((EXAMPLE / "inferenceservice.yaml").read_text())["spec"]
    [container] = spec["predictor"]["containers"]
    return container


@pytest.fixture
def mounted(tmp_path) -> Path:
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


def started(container: dict, mounted: Path) -> RunningAdapter:
    """The container, with a Triton of its own and free ports."""
    given = {each["name"]: each["value"].replace(MODELS, str(mounted)) for each in container["env"]}
    roots = f"--model-roots={given.pop('ADAPTER_MODEL_ROOTS')}"
    return embedded_adapter(roots, COMPLETE, environ=given)


@pytest.fixture
def served(container, mounted) -> Iterator[RunningAdapter]:
    with started(container, mounted) as adapter:
        yield adapter


@pytest.fixture
def agent(served, mounted, tmp_path) -> Iterator[Agent]:
    """Versions 1 and 2 of a model are in its storage; they answer once and twice what they get."""
    for version, answer in (("1", "pass"), ("2", "values = 2 * values")):
        write_python_model(tmp_path / "storage" / version, answer=answer)
    with served.client() as client:
        yield Agent(mounted, tmp_path / "storage", client)


def answer_of(client: Client, name: str) -> list[float] | int:
    """What the model makes of 1.5; the status where that is not 200."""
    reply = client.post(f"/v2/models/{name}/infer", infer_body(1.5))
    return reply.data if reply.status == 200 else reply.status


def names(client: Client) -> list[str]:
    return [model["name"] for model in client.post("/v2/repository/index").json()]


@pytest.mark.triton
def test_agents_models_are_loaded_and_removed(agent, served):
    [loaded] = agent.config(("a", "s3://1"))
    assert loaded.status == 200
    assert answer_of(agent.client, "a") == [1.5]

    [second] = agent.config(("a", "s3://1"), ("b", "s3://2"))
    assert second.status == 200
    assert (answer_of(agent.client, "a"), answer_of(agent.client, "b")) == ([1.5], [3.0])

    [unloaded] = agent.config(("b", "s3://2"))
    assert not (agent.models / "a").exists()
    assert unloaded.status == 200
    assert names(agent.client) == ["b"]
    assert answer_of(agent.client, "a") == 404
    assert [path.name for path in served.repository.iterdir() if path.name == "a"] == []


@pytest.mark.triton
def test_changed_storage_uri_replaces_the_model(agent):
    agent.config(("a", "s3://1"))

    assert [reply.status for reply in agent.config(("a", "s3://2"))] == [200, 200]

    assert answer_of(agent.client, "a") == [3.0]


@pytest.mark.triton
def test_an_agent_that_comes_back_loads_nothing_twice(agent, served):
    agent.config(("a", "s3://1"))

    back = agent.restarted()
    assert back.config(("a", "s3://1")) == []
    back.tracked.clear()  # as one that had no time to read what there is
    assert [reply.status for reply in back.config(("a", "s3://1"))] == [200]

    assert answer_of(agent.client, "a") == [1.5]
    assert len(served.events("model.loaded")) == 1


@pytest.mark.triton
def test_failed_load_says_why_then_good_one_serves(agent):
    shutil.rmtree(agent.storage / "1" / "1")
    [refused] = agent.config(("a", "s3://1"))
    assert (refused.status, refused.code) == (400, "InvalidModel")

    assert [reply.status for reply in agent.config(("a", "s3://2"))] == [200, 200]
    assert answer_of(agent.client, "a") == [3.0]


@pytest.mark.triton
def test_returning_container_has_its_agents_models(container, mounted, tmp_path):
    """The agent does not load them again."""
    write_python_model(tmp_path / "storage" / "1")
    for run in (1, 2):
        with started(container, mounted) as adapter, adapter.client() as client:
            if run == 1:
                Agent(mounted, tmp_path / "storage", client).config(("a", "s3://1"))
            else:
                adapter.wait_for("model.loaded")
            assert answer_of(client, "a") == [1.5]
            assert client.get(container["readinessProbe"]["httpGet"]["path"]).status == 200


@pytest.mark.triton
def test_examples_hook_ends_once_loads_are_accepted(agent, served, container):
    program, *words = container["lifecycle"]["postStart"]["exec"]["command"]
    words = [word.replace("127.0.0.1:8081", served.admin) for word in words]
    assert program == "triton-adapter"

    subprocess.run([sys.executable, "-m", "adapter", *words], check=True, timeout=30)

    assert [reply.status for reply in agent.config(("a", "s3://1"))] == [200]


def test_example_is_a_multi_model_server_for_kserve(container):
    """IsMMSPredictor and mountModelDir of kserve/kserve v0.15.2."""
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["MULTI_MODEL_SERVER"] == "true"
    assert container["name"] == "kserve-container"
    assert variables["ADAPTER_MODEL_ROOTS"] == MODELS
    assert container["resources"]["limits"]["memory"]
    assert [port["containerPort"] for port in container["ports"]] == [8080]


def test_trained_model_meets_its_crd():
    """config/crd/full of kserve/kserve v0.15.2."""
    service = yaml.safe_load((EXAMPLE / "inferenceservice.yaml").read_text())
    model = yaml.safe_load((EXAMPLE / "trainedmodel.yaml").read_text())
    assert model["spec"].keys() == {"inferenceService", "model"}
    assert model["spec"]["model"].keys() == {"storageUri", "framework", "memory"}
    assert model["spec"]["inferenceService"] == service["metadata"]["name"]
