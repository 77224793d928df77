"""The container as SageMaker runs it: `docker run IMAGE serve`, its variables, its signals."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker import DockerClient
from docker.models.containers import Container

from tests.e2e.stack import HEAL_SECONDS
from tests.ports import free_ports
from tests.running import EXAMPLES, Client, wait_until

SAMPLE = (EXAMPLES / "digits" / "sample.json").read_bytes()
# as /proc/net/tcp has them, and tcp6 in the last eight digits
EVERYWHERE, LOOPBACK = "00000000", "0100007F"
MIB = 2**20
SIGKILL_COMES_AFTER_SECONDS = 30  # of SIGTERM
KILL_TRITON = """
import os, pathlib
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    if (folder / "comm").read_text() == "tritonserver\\n":
        os.kill(int(folder.name), 9)
"""


@dataclass
class Served:
    container: Container
    client: Client

    def answers(self, status: int) -> bool:
        try:
            return self.client.get("/ping").status == status
        except OSError:
            return False

    def wait_well(self) -> None:
        wait_until(lambda: self.answers(200), HEAL_SECONDS, "/ping is 200")

    def processes(self) -> list[tuple[str, str]]:
        """Command and state of each, Z for a dead one."""
        code = (
            "import pathlib\n"
            "for f in pathlib.Path('/proc').glob('[0-9]*'): print((f / 'stat').read_text(), end='')"
        )
        said = self.container.exec_run(["python3", "-c", code]).output.decode()
        stats = [line.rpartition(")") for line in said.splitlines()]
        return [(before.partition("(")[2], after.split()[0]) for before, _, after in stats]


@contextmanager
def serving(
    engine: DockerClient,
    image: str,
    mounts: Mapping[Path, str],
    port: int,
    mem_limit: int | None = None,
    **environ: str,
) -> Iterator[Served]:
    [published] = free_ports(1)
    container = engine.containers.run(
        image,
        ["serve"],
        detach=True,
        environment=environ,
        mem_limit=mem_limit,
        ports={f"{port}/tcp": ("127.0.0.1", published)},
        volumes={str(path): {"bind": at, "mode": "ro"} for path, at in mounts.items()},
    )
    try:
        with closing(Client(f"127.0.0.1:{published}")) as client:
            yield Served(container, client)
    finally:
        container.remove(force=True, v=True)


@pytest.fixture
def many(engine, sagemaker_image) -> Iterator[Served]:
    """Multi-model mode, with a port and a range of ports as the platform gives them."""
    mounts = {EXAMPLES / name: f"/opt/ml/models/{name}/model" for name in ("digits", "identity")}
    environ = {
        "SAGEMAKER_MULTI_MODEL": "true",
        "SAGEMAKER_BIND_TO_PORT": "8443",
        "SAGEMAKER_SAFE_PORT_RANGE": "8500-8600",
        "SAGEMAKER_TRITON_LOG_VERBOSE": "true",
        "SAGEMAKER_TRITON_THREAD_COUNT": "2",
        "SAGEMAKER_TRITON_BUFFER_MANAGER_THREAD_COUNT": "1",
        "SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE": "16777216",
        "SAGEMAKER_TRITON_SHM_GROWTH_BYTE_SIZE": "1048576",
        "SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--model-load-thread-count=2",
    }
    with serving(engine, sagemaker_image, mounts, 8443, **environ) as served:
        served.wait_well()
        yield served


@pytest.fixture
def one(engine, sagemaker_image) -> Iterator[Served]:
    """Single-model mode: what is there when the platform says nothing."""
    mounts = {EXAMPLES / "digits": "/opt/ml/model/digits"}
    with serving(engine, sagemaker_image, mounts, 8080) as served:
        served.wait_well()
        yield served


def test_many_models_are_loaded_invoked_and_unloaded(many):
    assert many.client.load("digits", "/opt/ml/models/digits/model").status == 200
    assert many.client.post("/models/digits/invoke", SAMPLE).status == 200
    assert many.client.post("/invocations", SAMPLE).status == 400
    assert many.client.delete("/models/digits").status == 200


def test_nothing_but_the_bound_port_listens_outside(many):
    """Triton's and the admin listener's ports are in the safe range, for this container alone."""
    code = (
        "import pathlib\n"
        "for table in ('/proc/net/tcp', '/proc/net/tcp6'):\n"
        "    for line in pathlib.Path(table).read_text().splitlines()[1:]:\n"
        "        _, local, _, state = line.split()[:4]\n"
        "        if state == '0A': print(local)"
    )

    said = many.container.exec_run(["python3", "-c", code]).output.decode()

    listening = {
        (host[-8:], int(port, 16)) for host, port in (line.split(":") for line in said.split())
    }
    others = listening - {(EVERYWHERE, 8443)}
    assert len(others) == len(listening) - 1
    assert others == {(LOOPBACK, port) for port in (8500, 8501, 8502, 8503)}


def test_sigterm_ends_it_with_0_before_sigkill_comes(many):
    many.client.load("digits", "/opt/ml/models/digits/model")
    many.client.close()

    many.container.kill(signal.SIGTERM)

    assert many.container.wait(timeout=SIGKILL_COMES_AFTER_SECONDS)["StatusCode"] == 0


def test_restarted_triton_leaves_no_zombie(many):
    for name in ("digits", "identity"):
        many.client.load(name, f"/opt/ml/models/{name}/model")
    many.container.exec_run(["python3", "-c", KILL_TRITON])

    wait_until(lambda: many.answers(503), HEAL_SECONDS, "/ping tells that Triton is gone")
    many.wait_well()

    assert many.client.load("digits", "/opt/ml/models/digits/model").status == 200
    assert [name for name, state in many.processes() if state == "Z"] == []


def test_too_much_for_container_is_507_not_killed(engine, sagemaker_image):
    """The ledger's limit is the container's less 128 MiB for the adapter; a model takes 700."""
    mounts = {EXAMPLES / "hungry_declared": "/opt/ml/models/hungry"}
    multi = {"SAGEMAKER_MULTI_MODEL": "true"}
    with serving(engine, sagemaker_image, mounts, 8080, 1536 * MIB, **multi) as served:
        served.wait_well()
        assert served.client.load("one", "/opt/ml/models/hungry").status == 200

        refused = served.client.load("two", "/opt/ml/models/hungry")

        assert refused.status == 507
        assert refused.json()["limit_bytes"] == (1536 - 128) * MIB
        served.container.reload()
        assert served.container.attrs["State"]["OOMKilled"] is False
        assert served.client.get("/models/one").status == 200


def test_unknown_ping_mode_exits_with_2(engine, sagemaker_image):
    environ = {"SAGEMAKER_TRITON_OVERRIDE_PING_MODE": "sometimes"}
    with serving(engine, sagemaker_image, {}, 8080, **environ) as served:
        assert served.container.wait(timeout=30)["StatusCode"] == 2
        assert b"SAGEMAKER_TRITON_OVERRIDE_PING_MODE: 'sometimes'" in served.container.logs()


def test_it_needs_no_root(engine, sagemaker_image, one):
    """All tests of this file are served by the user of the base here, who is not root."""
    assert engine.images.get(sagemaker_image).attrs["Config"]["User"] == "65532:65532"
    assert one.client.post("/invocations", SAMPLE).status == 200


def test_labels_name_licence_base_and_capabilities(engine, images, sagemaker_image):
    labels = engine.images.get(sagemaker_image).labels

    assert labels["com.amazonaws.sagemaker.capabilities.multi-models"] == "true"
    assert labels["com.amazonaws.sagemaker.capabilities.accept-bind-to-port"] == "true"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.base.name"] == images["TRITON_CPU_IMAGE"]
    assert labels["org.opencontainers.image.base.digest"] == "unknown"
