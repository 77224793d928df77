"""The profile `fleet`: an Envoy, three machines with a Triton each, and a bucket."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress

import pytest
from docker import DockerClient
from docker.errors import ImageNotFound
from docker.models.containers import Container

from tests.e2e.stack import Stack, running
from tests.journeys.endpoint.conftest import client_of
from tests.trees import infer_body, write_python_model

NAMES = [f"m{number}.tar.gz" for number in range(8)]
IMAGES = {f"{name.upper()}_IMAGE": f"e2e/{name}:test" for name in ("machine", "envoy", "bucket")}
LIST = (
    "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/models').read().decode())"
)


@pytest.fixture(scope="module")
def fleet_images(engine: DockerClient, images: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """As compose.yaml builds them, gone in the end, but for those that other tests have too."""
    environ = {**images, **IMAGES}
    Stack(engine, environ, profile="fleet").compose("build")
    yield environ
    for name in IMAGES.values():
        with suppress(ImageNotFound):
            engine.images.remove(name, force=True)


@pytest.fixture(scope="module")
def fleet(
    engine: DockerClient,
    fleet_images: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("models")
    for number, name in enumerate(NAMES):
        answer = f"values = values + {number}"
        write_python_model(folder / name.removesuffix(".tar.gz"), answer=answer)
    folder.chmod(0o755)
    environ = {**fleet_images, "MODELS_DIR": str(folder)}
    with running(engine, environ, profile="fleet") as up:
        yield up


def invoke(fleet: Stack, name: str) -> tuple[float, str]:
    """Return what the model has added, and what the machine had of it."""
    body = json.dumps(infer_body(0.0)).encode()
    with closing(client_of(fleet.http)) as client:
        answer = client.invoke_endpoint(EndpointName="any", TargetModel=name, Body=body)
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    [output] = json.loads(answer["Body"].read())["outputs"]
    return output["data"][0], headers["x-triton-adapter-cache"]


def models(machine: Container) -> set[str]:
    done = machine.exec_run(["python3", "-c", LIST])
    assert done.exit_code == 0, done.output.decode()
    return {each["modelName"] for each in json.loads(done.output)["models"]}


def test_killed_machines_models_are_called_at_another(
    fleet: Stack,
) -> None:
    machines = fleet.containers("machine")
    assert len(machines) == 3

    firsts = [invoke(fleet, name) for name in NAMES]
    again = [invoke(fleet, name) for name in NAMES for _ in range(3)]
    assert firsts == [(number, "miss") for number in range(len(NAMES))]
    assert again == [(number, "hit") for number in range(len(NAMES)) for _ in range(3)]
    resident = [models(each) for each in machines]
    assert sorted(name for each in resident for name in each) == NAMES
    assert sum(1 for each in resident if each) > 1

    lost = max(machines, key=lambda each: len(models(each)))
    lost.kill()
    assert [invoke(fleet, name)[0] for name in NAMES] == [*range(len(NAMES))]
    rest = set().union(*(models(each) for each in machines if each.id != lost.id))
    assert rest == {*NAMES}


def test_machines_share_no_disk_behind_envoy(fleet: Stack) -> None:
    volumes = [
        mount["Name"]
        for each in fleet.containers("machine")
        for mount in each.attrs["Mounts"]
        if mount["Type"] == "volume"
    ]
    assert len(volumes) == len(set(volumes)) == 6

    published = {
        service: [port for port in fleet.containers(service)[0].ports.values() if port]
        for service in ("envoy", "machine", "bucket")
    }
    address = {"HostIp": "127.0.0.1", "HostPort": fleet.http.rpartition(":")[2]}
    assert published == {"envoy": [[address]], "machine": [], "bucket": []}
