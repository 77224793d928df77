"""The pod whose one container has the adapter and Triton."""

import os
import signal
from contextlib import closing
from urllib.request import urlopen

import pytest

from adapter.settings import load_settings
from tests.chart.chart import values_of
from tests.chart.pod import environment_of_the_one_container
from tests.ports import free_ports
from tests.running import Client, RunningAdapter
from tests.trees import infer_body, write_python_model

SINGLE = values_of("single")


def settings_of_the_one_container(values):
    return load_settings({}, environment_of_the_one_container(values), None).settings


def test_one_container_has_listeners_of_a_pod():
    """Those of an endpoint of SageMaker are other ones."""
    settings = settings_of_the_one_container(SINGLE)

    listeners = settings.http, settings.grpc, settings.admin, settings.metrics
    assert [str(address) for address in listeners] == [
        *("[::]:8080", "[::]:8085", "[::]:8081", "[::]:8082")
    ]
    assert (settings.triton, settings.single_model) == ("embedded", None)
    assert settings.load_at_start == ("*",)
    assert settings.triton_args == (
        "--model-load-thread-count=4",
        "--log-verbose=1",
        "--backend-config=python,shm-default-byte-size=1048576",
    )


def test_embedded_tritons_argument_comes_through_the_environment():
    values = {**SINGLE, "triton": {"extraArgs": ["--backend-config=python,name=it's mine"]}}

    assert settings_of_the_one_container(values).triton_args[1:] == (
        "--backend-config=python,name=it's mine",
    )


@pytest.mark.parametrize(
    ("triton", "limit"),
    [
        ({"gpu": {"count": 0}}, 7 * 2**30 - 128 * 2**20),
        ({"gpu": {"count": 0}, "resources": {"limits": {"memory": None}}}, None),
        ({}, None),
    ],
)
def test_adapter_in_one_container_keeps_128_mib(triton, limit):
    settings = settings_of_the_one_container({**SINGLE, "triton": triton})

    assert settings.memory_limit == limit


@pytest.fixture
def wanted(tmp_path):
    write_python_model(tmp_path / "models" / "wanted")
    return tmp_path / "models"


def invoked(adapter: RunningAdapter) -> int:
    with closing(adapter.client()) as client:
        return client.post("/models/wanted/invoke", infer_body(1.0)).status


def is_ready(adapter: RunningAdapter) -> bool:
    with closing(Client(adapter.listeners["metrics"])) as metrics:
        return metrics.get("/readyz").status == 200


@pytest.mark.triton
def test_killed_single_container_returns_with_its_models(wanted, tmp_path):
    """Its volumes are those of the pod, so that it finds what the one before it has left."""
    flags = (
        *("--http=127.0.0.1:0", "--admin=127.0.0.1:0", "--metrics=127.0.0.1:0"),
        *(f"--repository={tmp_path / 'repository'}", f"--model-roots={wanted}"),
        *("--triton-http=127.0.0.1:0", "--triton-grpc=127.0.0.1:0"),
    )
    environ = environment_of_the_one_container(SINGLE) | {"ADAPTER_DRAIN_MIN_SECONDS": "0"}
    for end in (signal.SIGKILL, signal.SIGTERM):
        [port] = free_ports(1)
        running = RunningAdapter(*flags, f"--triton-metrics=0.0.0.0:{port}", environ=environ)
        try:
            running.wait_for("adapter.models_loaded", models=1)
            assert (is_ready(running), invoked(running)) == (True, 200)
            with urlopen(f"http://127.0.0.2:{port}/metrics") as answer:
                assert b"nv_inference_count" in answer.read()
        finally:
            if running.process.poll() is None:
                os.kill(running.process.pid, end)
            code = running.stop()
    assert code == 0, running.errors
