"""A machine by the file of docs/fleet.md, "Without containers", behind the Envoy of that page."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tritonclient import grpc

from tests.docs.pages import ROOT, blocks
from tests.fleet.envoy import RunningEnvoy
from tests.fleet.machines import invoke, put_model
from tests.ports import free_ports
from tests.running import Client, RunningAdapter, wait_until

NAME = "without-containers.tar.gz"


def on_the_page() -> dict[str, Any]:
    found = [b.text for b in blocks(ROOT / "docs/fleet.md") if b.language == "yaml"]
    [machine] = [text for text in found if "triton: embedded" in text]
    return dict(yaml.safe_load(machine))


class ByThePage:
    """What deploy/fleet/generate is told of it, as the page says its ports."""

    def __init__(self, settings: dict[str, Any]) -> None:
        ports = [
            settings[each].rpartition(":")[2] for each in ("http_data", "metrics", "grpc_data")
        ]
        self.argument = f"127.0.0.1:{':'.join(ports)}"


@pytest.fixture
def settings(bucket, tmp_path) -> dict[str, Any]:
    """Those of the page, at a bucket, a disk and ports of this test."""
    found = on_the_page()
    listeners = ("http_data", "grpc_data", "metrics")
    for listener, port in zip(listeners, free_ports(len(listeners)), strict=True):
        host, _, _ = found[listener].rpartition(":")
        found[listener] = f"{host}:{port}"
    own = {"model_store": f"s3://{bucket.name}/models", "cache_dir": str(tmp_path / "cache")}
    return {**found, **own, "cache_limit": "1GiB", "memory_limit": "1GiB"}


@pytest.fixture
def envoy(settings, bucket, tmp_path) -> Iterator[RunningEnvoy]:
    put_model(bucket, tmp_path / "draft", NAME, number=1)
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump(settings))
    flags = [f"--{each}=127.0.0.1:0" for each in ("http", "admin")]
    flags += [f"--triton-{each}=127.0.0.1:0" for each in ("http", "grpc", "metrics")]
    flags += [f"--grpc-data={settings['grpc_data']}", f"--model-roots={tmp_path}"]
    environ = {**bucket.environ, "MACHINE": "paged"}
    machine = RunningAdapter(f"--config={file}", *flags, environ=environ)
    try:
        machine.wait_for("adapter.started")
        envoy = RunningEnvoy([ByThePage(settings)], Path(tmp_path))
        try:
            wait_until(lambda: len(envoy.healthy()) == 1, 60, "Envoy sends to it")
            yield envoy
        finally:
            envoy.stop()
    finally:
        machine.stop()


def test_machine_of_the_page_outlasts_envoys_look():
    """It is open to other machines."""
    found = on_the_page()
    own = {name: found[name].rpartition(":")[0] for name in ("http_data", "grpc_data", "metrics")}

    assert found["drain_min_seconds"] >= 2
    assert own == dict.fromkeys(own, "[::]")


@pytest.mark.triton
def test_pages_machine_answers_behind_envoy_without_loads(envoy, settings):
    tensor = grpc.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.array([1.5], np.float32))

    with closing(envoy.client()) as client:
        by_endpoint = invoke(client, NAME)
    with closing(grpc.InferenceServerClient(envoy.address)) as client:
        by_grpc = client.infer(NAME, [tensor], headers={"mm-model-id": NAME}).as_numpy("OUT")
    port = settings["http_data"].rpartition(":")[2]
    with closing(Client(f"127.0.0.1:{port}")) as machine:
        load = machine.post("/models", {"model_name": "a", "url": "/a"})

    assert (by_endpoint.status, by_endpoint.value, by_endpoint.cache) == (200, 1.0, "miss")
    assert by_grpc.tolist() == [2.5]
    assert load.status == 403
