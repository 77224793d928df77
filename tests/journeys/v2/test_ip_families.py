"""`::` listens at all addresses, of IPv6 and IPv4; where there is no IPv6, at those of IPv4."""

import subprocess
import sys
from collections.abc import Iterator, Mapping

import grpc
import pytest

from tests.grpcurl import Grpcurl
from tests.running import Client, RunningAdapter, embedded_adapter, wait_until

pytestmark = pytest.mark.triton

# the listeners of the chart and of our images, at ports that are free
EVERYWHERE = ("--http=[::]:0", "--grpc=[::]:0", "--admin=[::]:0")
PATHS = {"http": "/ping", "admin": "/readyz"}


@pytest.fixture(scope="module")
def adapter() -> Iterator[RunningAdapter]:
    with embedded_adapter(*EVERYWHERE) as running:
        yield running


def port_of(adapter: RunningAdapter, listener: str) -> str:
    return adapter.listeners[listener].rpartition(":")[2]


def statuses(adapter: RunningAdapter, host: str) -> Mapping[str, int]:
    found = {}
    for listener, path in PATHS.items():
        with Client(f"{host}:{port_of(adapter, listener)}") as client:
            found[listener] = client.get(path).status
    return found


def health(adapter: RunningAdapter, host: str) -> Mapping[str, str]:
    with grpc.insecure_channel(f"{host}:{port_of(adapter, 'grpc')}") as channel:
        return Grpcurl(channel).run(["-plaintext", "-d", "{}", host, "grpc.health.v1.Health/Check"])


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_each_listener_answers_over_both_families(adapter, host):
    assert statuses(adapter, host) == {"http": 200, "admin": 200}
    assert health(adapter, host) == {"status": "SERVING"}


def test_the_log_names_the_address_of_both_families(adapter):
    assert {address[:5] for address in adapter.listeners.values()} == {"[::]:"}


def test_the_commands_ask_it_where_it_listens_everywhere(adapter):
    command = [sys.executable, "-m", "adapter", "healthcheck", f"--admin={adapter.admin}"]

    def is_well() -> bool:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return (asked.returncode, asked.stderr) == (0, "")

    # it takes an answer that comes after two seconds for none
    wait_until(is_well, 30, "it says that all is well")


def test_without_ipv6_it_listens_over_ipv4():
    with embedded_adapter(*EVERYWHERE, module="tests.without_ipv6") as adapter:
        assert {address[:8] for address in adapter.listeners.values()} == {"0.0.0.0:"}
        assert statuses(adapter, "127.0.0.1") == {"http": 200, "admin": 200}
        assert health(adapter, "127.0.0.1") == {"status": "SERVING"}
