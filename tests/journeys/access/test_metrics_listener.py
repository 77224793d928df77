"""The listener `metrics`: what Prometheus and a kubelet need, and nothing that ends the work."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.ports import free_ports
from tests.running import EXAMPLES, Client, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

PROBES = ("/livez", "/startup", "/readyz", "/metrics")
OPERATORS = (
    ("POST", "/drain?timeout=0.1"),
    ("GET", "/resident"),
    ("GET", "/debug/state"),
    ("GET", "/debug/config"),
    ("GET", "/debug/tasks"),
)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningAdapter]:
    with embedded_adapter("--metrics=127.0.0.1:0") as adapter:
        yield adapter


def test_metrics_listener_has_only_metrics_and_probes(running):
    with Client(running.listeners["metrics"]) as metrics:
        assert [metrics.get(path).status for path in PROBES] == [200] * len(PROBES)
        assert "triton_adapter_ready 1.0" in metrics.get("/metrics").body.decode()
        for method, path in OPERATORS:
            assert metrics.request(method, path).status == 404
        assert metrics.get("/readyz").status == 200  # nothing was drained


def test_metrics_leave_admin_for_their_listener(running):
    with Client(running.admin) as admin:
        assert [admin.get(path).status for path in PROBES] == [404] * len(PROBES)
        assert admin.get("/debug/state").status == 200


@pytest.mark.parametrize("command", ["healthcheck", "wait"])
def test_probing_commands_ask_the_metrics_listener(running, command):
    places = {f"ADAPTER_{name.upper()}": running.listeners[name] for name in ("admin", "metrics")}

    def ran(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "adapter", command],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert ran(places).returncode == 0
    wrong = ran({"ADAPTER_ADMIN": running.admin})
    assert wrong.returncode == 1
    assert "404" in wrong.stdout + wrong.stderr


def test_shared_address_is_one_listener_with_all():
    data, admin = (f"127.0.0.1:{port}" for port in free_ports(2))
    flags = (f"--http={data}", f"--http-data={data}", f"--admin={admin}", f"--metrics={admin}")
    with embedded_adapter(*flags) as running, Client(data) as http, Client(admin) as operator:
        assert not {"http_data", "metrics"} & running.listeners.keys()
        http.load_model("m", EXAMPLES / "identity")
        assert [operator.get(path).status for path in PROBES] == [200] * len(PROBES)
        assert operator.get("/debug/state").status == 200
