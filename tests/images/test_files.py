"""Dockerfile, compose.yaml and what stands around them, as far as no engine is needed."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from adapter.settings import Settings
from adapter.triton.server.launch import allocator_variables

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
INSTALL = (ROOT / "deploy/images/install").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
SCRIPTS = sorted(
    path
    for folder in ("scripts", "deploy/images", ".ci")
    for path in (ROOT / folder).iterdir()
    if path.is_file() and path.suffix != ".py" and path.read_text("utf-8").startswith("#!")
)
VARIABLE = re.compile(r"\$\{(\w+):-([^}]+)\}")


def tool(name: str, *arguments: str) -> None:
    program = Path(sys.executable).with_name(name)
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def default(text: str) -> str:
    """What a value with variables in it is when none of them is set."""
    return VARIABLE.sub(r"\2", text)


def published(service: str) -> list[str]:
    return [default(port) for port in SERVICES[service].get("ports", [])]


def argument(name: str) -> str:
    found = re.findall(rf"^ARG {name}=(.+)$", DOCKERFILE, re.MULTILINE)
    assert len(set(found)) == 1
    return found[0]


def test_hadolint_has_nothing_to_say():
    tool("hadolint", str(ROOT / "Dockerfile"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(path):
    tool("shellcheck", str(path))


def test_the_version_on_the_label_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert argument("VERSION") == project["project"]["version"]


@pytest.mark.parametrize("name", ["adapter", "build", "triton-cpu", "envoy", "bucket"])
def test_what_an_image_installs_is_locked_with_hashes(name):
    commands = DOCKERFILE + INSTALL.replace('"$requirements"', f"/requirements/{name}.txt")
    assert f"--require-hashes -r /requirements/{name}.txt" in commands
    assert f" /requirements/{name}.txt" in DOCKERFILE
    locked = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    for package in re.split(r"\n(?=\w)", locked.strip()):
        assert "--hash=sha256:" in package, package


def test_lock_has_tracing_and_store_packages():
    locked = (ROOT / "requirements" / "adapter.txt").read_text(encoding="utf-8")
    assert "\nopentelemetry-sdk==" in locked
    assert "\nopentelemetry-exporter-otlp-proto-http==" in locked
    assert "\nobstore==" in locked


def test_the_images_and_compose_have_the_same_defaults():
    build = SERVICES["adapter"]["build"]
    assert default(build["args"]["PYTHON_IMAGE"]) == argument("PYTHON_IMAGE")
    assert default(SERVICES["triton"]["image"]) == argument("TRITON_IMAGE")


@pytest.mark.parametrize("service", ["triton", "triton-cpu"])
def test_compose_gives_triton_the_adapters_allocator_variables(service):
    assert SERVICES[service]["environment"] == allocator_variables({})


def test_ports_are_configurable_and_on_loopback():
    written = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(written) >= 3
    assert [port for port in written if not VARIABLE.search(port)] == []
    for port in (port for service in SERVICES for port in published(service)):
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\d+", port)


def test_only_the_adapters_listeners_are_published():
    ports = {port.split(":")[2]: port.split(":")[1] for port in published("adapter")}
    assert ports == {port: port for port in ("8080", "8081", "8085")}
    assert published("triton") == published("triton-cpu") == []


def test_listeners_are_reachable_from_outside_the_container():
    """By the environment, which a setting of each listener beats."""
    for target in ("adapter", "sagemaker", "machine"):
        behind = DOCKERFILE.partition(f" AS {target}\n")[2]
        stage = behind.partition("\nFROM ")[0].replace("\\\n", " ")
        assert re.search(r"^ENV .* ADAPTER_LISTEN_HOST=::(\s|$)", stage, re.MULTILINE)
    assert SERVICES["adapter"]["environment"]["ADAPTER_LISTEN_HOST"] == "::"


def test_each_profile_has_one_triton_under_one_name():
    for service, profile in (("triton", "gpu"), ("triton-cpu", "cpu")):
        assert SERVICES[service]["profiles"] == [profile]
        assert SERVICES[service]["networks"]["default"]["aliases"] == ["triton"]
    assert SERVICES["adapter"]["profiles"] == ["cpu", "gpu"]
    assert SERVICES["triton"]["volumes"] == SERVICES["triton-cpu"]["volumes"]
    only_gpu = SERVICES["triton"].keys() - SERVICES["triton-cpu"].keys()
    assert only_gpu == {"ulimits", "deploy"}


def test_adapter_starts_after_and_stops_before_triton():
    needs = SERVICES["adapter"]["depends_on"]
    assert needs.keys() == {"triton", "triton-cpu"}
    assert all(one == {"condition": "service_healthy", "required": False} for one in needs.values())


def test_store_credentials_are_the_adapters_alone():
    """And are there only where they are set."""
    environment = SERVICES["adapter"]["environment"]
    of_stores = {name for name in environment if name.startswith(("AWS_", "AZURE_"))}
    assert of_stores >= {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3"}
    for name in {*of_stores, "ADAPTER_MODEL_STORE", "ADAPTER_CACHE_LIMIT"}:
        assert environment[name] is None
    assert not of_stores & SERVICES["triton"]["environment"].keys()


def test_stopped_machine_serves_until_envoy_has_seen():
    envoy = yaml.safe_load((ROOT / "deploy/fleet/envoy.yaml").read_text(encoding="utf-8"))
    looks = {
        int(check["interval"].removesuffix("s"))
        for cluster in envoy["static_resources"]["clusters"]
        for check in cluster["health_checks"]
    }
    minimum = float(SERVICES["machine"]["environment"]["ADAPTER_DRAIN_MIN_SECONDS"])
    kept = float(SERVICES["machine"]["stop_grace_period"].removesuffix("s"))

    assert minimum >= max(looks) + 1
    assert minimum < Settings().drain_timeout_seconds < kept


@pytest.mark.parametrize("service", SERVICES)
def test_service_has_no_privilege_and_variable_limits(service):
    """Its image and its limit of memory can be others."""
    found = SERVICES[service]
    assert (found["cap_drop"], found["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert VARIABLE.fullmatch(found["image"])
    assert VARIABLE.fullmatch(found["mem_limit"])


@pytest.mark.parametrize(("password", "creates_none"), [("", "true"), ("s3cret", "")])
def test_grafana_admin_needs_a_password(tmp_path, password, creates_none):
    """Its command, with a stand-in for what Grafana's image starts with."""
    grafana = SERVICES["grafana"]
    assert "${GRAFANA_PASSWORD:-}" in grafana["environment"].values()
    start = tmp_path / "run.sh"
    start.write_text('#!/bin/sh\necho "$GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"\n')
    start.chmod(0o755)
    [command] = grafana["command"]

    said = subprocess.run(
        [*grafana["entrypoint"], command.replace("$$", "$").replace("/run.sh", str(start))],
        env={"GF_SECURITY_ADMIN_PASSWORD": password},
        capture_output=True,
        text=True,
        check=True,
    )

    assert said.stdout.strip() == creates_none


def test_prometheus_asks_the_admin_listener_and_triton():
    config = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text(encoding="utf-8"))
    targets = {
        target
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    assert targets == {"adapter:8081", "triton:8002"}
    [rules] = config["rule_files"]
    [chart] = [v for v in SERVICES["prometheus"]["volumes"] if "chart" in str(v)]
    assert rules == f"{chart['target']}/alerts.yaml"


def test_grafana_finds_its_prometheus_and_its_dashboards():
    folder = ROOT / "deploy/monitoring/grafana"
    [source] = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    [provider] = yaml.safe_load((folder / "dashboards/files.yaml").read_text())["providers"]
    assert source["url"] == "http://prometheus:9090"
    targets = [v["target"] for v in SERVICES["grafana"]["volumes"] if isinstance(v, dict)]
    assert provider["options"]["path"] in targets


def test_what_deploy_gives_to_compose_is_there():
    volumes = [v for one in SERVICES.values() for v in one.get("volumes", [])]
    sources = {v["source"] for v in volumes if isinstance(v, dict)}
    ours = {source for source in sources if source.startswith("deploy/")}
    assert len(ours) == 3
    assert {source for source in ours if not (ROOT / source).exists()} == set()
