"""What Envoy Gateway makes of the chart's objects, by its own `egctl`, and a real fleet behind a
real Envoy with just that: its routes and its clusters, with machines in place of pods.
"""

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.buckets import Bucket, s3_server
from tests.builds import go_program
from tests.chart.chart import objects, values_of
from tests.fleet.envoy import RunningEnvoy
from tests.fleet.machines import Machine, invoke, machines, put_model, room_for
from tests.running import Client
from tests.trees import infer_body

pytestmark = [pytest.mark.triton, pytest.mark.timeout(2400)]

PROGRAM = "github.com/envoyproxy/gateway/cmd/egctl@v1.9.1"
BUILD_SECONDS = 1800  # on two cores that others use as well it took five minutes
CLASS = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "GatewayClass",
    "spec": {"controllerName": "gateway.envoyproxy.io/gatewayclass-controller"},
}
NAMES = [f"m{number}.tar.gz" for number in range(8)]
Translate = Callable[[str], dict[str, Any]]


@pytest.fixture
def translated(pytestconfig: pytest.Config, tmp_path: Path) -> Translate:
    """Have egctl validate the objects of a case and translate them, as Envoy Gateway does."""
    egctl = go_program(pytestconfig, "egctl", PROGRAM, BUILD_SECONDS)

    def translate(case: str) -> dict[str, Any]:
        made = [
            each
            for each in objects(values_of(case))
            if each["apiVersion"].startswith("gateway.") or each["kind"] == "Service"
        ]
        [gateway] = [each for each in made if each["kind"] == "Gateway"]
        named = {**CLASS, "metadata": {"name": gateway["spec"]["gatewayClassName"]}}
        path = tmp_path / f"{case}.yaml"
        path.write_text(yaml.safe_dump_all([named, *made]))
        command = [str(egctl), "experimental", "translate", "--to=gateway-api,xds", "--output=json"]
        done = subprocess.run(
            [*command, "--add-missing-resources", f"--file={path}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return translate


def conditions(found: Any, owner: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Each condition of a status, and the name of its object's kind."""
    if isinstance(found, dict):
        owner = found.get("kind", owner)
        for each in found.get("conditions") or []:
            yield owner, each
        for below in found.values():
            yield from conditions(below, owner)
    elif isinstance(found, list):
        for below in found:
            yield from conditions(below, owner)


@pytest.mark.parametrize("case", ["fleet", "fleet-patch"])
def test_envoy_gateway_accepts_every_object(translated, case):
    found = translated(case)
    found.pop("xds")
    said = list(conditions(found))

    assert {each["type"] for _, each in said} >= {"Accepted", "Programmed", "ResolvedRefs"}
    assert [(owner, each) for owner, each in said if each["status"] != "True"] == []


def dumped(found: dict[str, Any], dump: str, kind: str) -> list[dict[str, Any]]:
    """Of what goes to the Envoys all resources of a kind."""
    [dumps] = [each["configs"] for each in found["xds"].values()]
    [wanted] = [each for each in dumps if each["@type"].endswith(f".{dump}")]
    parts = [part for parts in wanted.values() if isinstance(parts, list) for part in parts]
    resources = [part.get("activeState", part)[kind] for part in parts]
    return [{key: each[key] for key in each if key != "@type"} for each in resources]


class TranslatedEnvoy(RunningEnvoy):
    """With the routes and clusters that Envoy Gateway has made, with machines for pods."""

    def __init__(self, found: dict[str, Any], fleet: Iterable[Machine], folder: Path) -> None:
        self._found = found
        super().__init__(fleet, folder)

    def configuration(self, machines: Iterable[Machine], *_: str) -> str:
        routes = {each["name"]: each for each in self._dumped("Routes", "routeConfig")}
        listener = next(
            each for each in self._dumped("Listeners", "listener") if each["name"].endswith("/http")
        )
        listener["address"] = _address(self.address)
        [manager] = listener["defaultFilterChain"]["filters"]
        settings = manager["typedConfig"]
        settings["routeConfig"] = routes[settings.pop("rds")["routeConfigName"]]
        clusters = [_static(each, list(machines)) for each in self._dumped("Clusters", "cluster")]
        text = json.dumps(
            {
                "admin": {"address": _address(self.admin)},
                "staticResources": {"listeners": [listener], "clusters": clusters},
            }
        )
        # RunningEnvoy looks for the health of the machines by the name in deploy/fleet
        return text.replace("httproute/serving/demo-triton-adapter/rule/0", "http")

    def _dumped(self, kinds: str, kind: str) -> list[dict[str, Any]]:
        return dumped(self._found, f"{kinds}ConfigDump", kind)


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socketAddress": {"address": host, "portValue": int(port)}}


def _static(cluster: dict[str, Any], machines: list[Machine]) -> dict[str, Any]:
    """The cluster with its members in it, in place of what Envoy Gateway would tell of them."""
    is_grpc = cluster["name"].startswith("grpcroute/")
    members = [
        {
            "endpoint": {
                "address": _address(each.grpc if is_grpc else each.http),
                "healthCheckConfig": {"portValue": each.ports[1]},
            }
        }
        for each in machines
    ]
    assignment = {"clusterName": cluster["name"], "endpoints": [{"lbEndpoints": members}]}
    kept = {
        key: value for key, value in cluster.items() if key not in ("@type", "edsClusterConfig")
    }
    return {**kept, "type": "STATIC", "loadAssignment": assignment}


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    folder = tmp_path_factory.mktemp("fleet")
    with s3_server() as endpoint:
        bucket = Bucket(endpoint, "fleet")
        for number, name in enumerate(NAMES):
            put_model(bucket, folder, name, number=number)
        with machines(3, bucket, folder, *room_for(8)) as fleet:
            yield fleet


@pytest.fixture
def fleet(shared_fleet: list[Machine]) -> list[Machine]:
    for each in shared_fleet:
        if not each.is_up:
            each.start()
    return shared_fleet


@pytest.fixture(params=["fleet", "fleet-patch"])
def envoy(
    request: pytest.FixtureRequest, translated: Translate, fleet: list[Machine], tmp_path: Path
) -> Iterator[RunningEnvoy]:
    running = TranslatedEnvoy(translated(request.param), fleet, tmp_path)
    try:
        running.wait_for(*fleet)
        yield running
    finally:
        running.stop()


def homes(client: Client) -> dict[str, str]:
    """Which machine answers for each model; it does so three times."""
    found: dict[str, str] = {}
    for number, name in enumerate(NAMES):
        answers = [invoke(client, name) for _ in range(3)]
        assert {(each.status, each.value) for each in answers} == {(200, number)}
        [found[name]] = {each.machine for each in answers}
    return found


def test_each_model_has_one_machine_and_another(envoy, fleet):
    with closing(envoy.client()) as client:
        before = homes(client)
        assert len(set(before.values())) > 1

        lost = next(each for each in fleet if each.name == before[NAMES[0]])
        lost.kill()
        answers = [invoke(client, name) for name in NAMES]

    assert [(each.status, each.value) for each in answers] == [(200, n) for n in range(len(NAMES))]
    assert lost.name not in {each.machine for each in answers}


@pytest.mark.parametrize("envoy", ["fleet-patch"], indirect=True)
def test_patched_v2_path_leads_to_models_machine(envoy):
    with closing(envoy.client()) as client:
        for name, home in homes(client).items():
            for _ in range(2):
                answer = client.post(f"/v2/models/{name}/infer", infer_body(0.0)).json()
                assert {each["name"]: each["data"] for each in answer["outputs"]}["MACHINE"] == [
                    home
                ]


@pytest.mark.parametrize("path", ["/models", "/v2/repository/index", "/openapi.json"])
def test_what_is_each_machines_own_is_not_routed(envoy, path):
    with closing(envoy.client()) as client:
        assert client.get(path).status == 404
