"""The environment that the chart makes is what the adapter takes, and adds up to its end."""

import pytest

from adapter.settings import load_settings
from tests.cases import rows
from tests.chart.chart import (
    CASES,
    case,
    containers,
    pod_spec,
    runtime_spec,
    values_of,
    variables,
)


def loaded(values):
    """Without what has its secrets in files of the pod."""
    here = variables(values)
    for name in ("ADAPTER_CONTROL_TOKEN", "ADAPTER_ENDPOINT_KEYS"):
        here.pop(name, None)
    return load_settings({}, here, None)


@rows("path", CASES)
def test_the_adapter_takes_the_environment_without_a_warning(path):
    assert loaded(values_of(case(path))).warnings == []


def test_each_kind_of_value_arrives_unchanged():
    settings = loaded(values_of("settings")).settings

    assert (str(settings.http), str(settings.grpc)) == ("0.0.0.0:9000", "off")
    assert str(settings.grpc_data) == "[::]:9001"
    assert [str(path) for path in settings.model_roots] == ["/opt/ml/models", "/srv/more"]
    assert settings.memory_limit == 8 * 2**30
    assert settings.memory_reserve.percent == 7
    assert settings.memory_source == "off"
    assert settings.oom_patterns == ("arena .* exhausted", "no room, {{ sorry }}")
    assert settings.passthrough == ("trace", "log")
    assert settings.inline_files == "off"
    assert settings.modelmesh_model_concurrency == "instances"
    assert settings.drain_min_seconds == 0
    assert settings.drain_timeout_seconds == 60.5


@rows("path", CASES)
def test_listener_with_port_is_reached_from_outside(path):
    values = values_of(case(path))
    if values.get("mode") == "servingRuntime":
        return
    settings = loaded(values).settings
    adapter = containers(pod_spec(values))["adapter"]

    names = [port["name"].replace("-", "_") for port in adapter["ports"]]

    assert names
    assert [name for name in names if not getattr(settings, name).is_open_to_others] == []


@rows("path", CASES)
def test_the_settings_agree_with_what_the_pod_has(path):
    values = values_of(case(path))
    settings = loaded(values).settings
    if values.get("mode") == "servingRuntime":
        both = containers(runtime_spec(values))
        arguments = both["triton"]["args"][1].split()
    else:
        both = containers(pod_spec(values))
        mounted = {mount["mountPath"] for mount in both["adapter"]["volumeMounts"]}
        assert {str(settings.repository), str(settings.model_roots[0])} <= mounted
        if "triton" not in both:
            assert (settings.triton, settings.staging) in {
                ("embedded", "symlink"),
                ("external", "upload"),
            }
            return
        arguments = both["triton"]["args"]

    assert settings.triton == "external"
    assert f"--model-repository={settings.repository}" in arguments
    assert (str(settings.triton_http), str(settings.triton_grpc)) == (
        "127.0.0.1:8000",
        "127.0.0.1:8001",
    )


@rows("path", CASES)
def test_grace_covers_hook_drain_and_tritons_end(path):
    values = values_of(case(path))
    if values.get("mode") == "servingRuntime":
        return
    spec = pod_spec(values)
    drain = loaded(values).settings.drain_timeout_seconds
    hook = values.get("adapter", {}).get("preStopSeconds", 0)
    arguments = containers(spec).get("triton", {"args": []})["args"]
    # after the drain an embedded Triton has up to 8 s
    ending = 8 if loaded(values).settings.triton == "embedded" else 0
    for argument in arguments:
        if argument.startswith("--exit-timeout-secs="):
            ending = int(argument.partition("=")[2])

    assert spec["terminationGracePeriodSeconds"] >= hook + drain + ending


@pytest.mark.parametrize("seconds", [48, 600])
def test_grace_of_the_values_is_taken(seconds):
    values = {"terminationGracePeriodSeconds": seconds}

    assert pod_spec(values)["terminationGracePeriodSeconds"] == seconds


def test_plain_triton_outlives_the_adapters_drain():
    values = {"triton": {"nativeSidecar": False}, "settings": {"drain_timeout_seconds": 40}}
    triton = containers(pod_spec(values))["triton"]

    assert triton["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "42"]
    assert "restartPolicy" not in triton
    assert "lifecycle" not in containers(pod_spec({}))["triton"]


def test_startup_probe_waits_for_triton_and_model():
    values = {"settings": {"start_timeout_seconds": 600, "load_timeout_seconds": 900}}
    probe = containers(pod_spec(values))["adapter"]["startupProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1500


@pytest.mark.parametrize(
    ("memory", "shm", "limit"),
    [
        ("8Gi", "1Gi", 7 * 2**30),
        ("500M", "", 500 * 10**6),
        ("1.5Gi", "512Mi", 2**30),
        (4294967296, "1Gi", 3 * 2**30),
    ],
)
def test_models_have_tritons_limit_less_shared_memory(memory, shm, limit):
    """Where there are no GPUs."""
    triton = {"gpu": {"count": 0}, "resources": {"limits": {"memory": memory}}, "shmSize": shm}

    assert loaded({"triton": triton}).settings.memory_limit == limit
    own = {"triton": triton, "settings": {"memory_limit": "256MiB"}}
    assert loaded(own).settings.memory_limit == 256 * 2**20


@pytest.mark.parametrize(
    ("given", "setting", "expected"),
    [
        ({"listen_host": "0.0.0.0"}, "metrics", "0.0.0.0:8082"),
        ({"drain_timeout_seconds": 3}, "drain_min_seconds", "3.0"),
        ({"on_triton_restart": "forget"}, "on_triton_restart", "forget"),
    ],
)
def test_setting_of_the_chart_follows_the_values(given, setting, expected):
    assert str(getattr(loaded({"settings": given}).settings, setting)) == expected
