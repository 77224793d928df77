"""A container engine, or the reason why there is none; and the images, built once."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from docker import DockerClient
from docker.errors import DockerException, ImageNotFound

from tests.e2e.stack import BUILD_CA, PYTHON_IMAGE, ROOT, Stack, running
from tests.running import EXAMPLES
from tests.trees import write_python_model

ADAPTER, TRITON, SAGEMAKER, LOAD = (
    f"e2e/{name}:test" for name in ("adapter", "triton-cpu", "sagemaker", "load")
)
# Takes as many seconds as the request says in its tensor.
SLOW = "import time; time.sleep(float(values[0]))"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerClient]:
    try:
        client = DockerClient.from_env()
        client.ping()
        subprocess.run(["docker", "compose", "version"], capture_output=True, check=True)
        subprocess.run(["docker", "buildx", "version"], capture_output=True, check=True)
    except (DockerException, OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no container engine with compose and buildx answers: {error}")
    yield client
    client.close()


@pytest.fixture(scope="session")
def images(engine: DockerClient) -> Iterator[dict[str, str]]:
    """As compose.yaml builds them; the variables that name them there. Gone in the end."""
    environ = {
        "ADAPTER_IMAGE": ADAPTER,
        "TRITON_CPU_IMAGE": TRITON,
        "LOAD_IMAGE": LOAD,
        "PYTHON_IMAGE": PYTHON_IMAGE,
    }
    Stack(engine, environ).compose("build")
    yield environ
    for name in (LOAD, SAGEMAKER, ADAPTER, TRITON):
        with suppress(ImageNotFound):
            engine.images.remove(name, force=True)


@pytest.fixture(scope="session")
def sagemaker_image(images: dict[str, str]) -> str:
    """On top of the Triton for the CPU, which is laid out as NVIDIA's images are."""
    done = subprocess.run(
        [
            *("docker", "build", "--network=host", f"--secret=id=ca,src={BUILD_CA}"),
            *(f"--build-arg=PYTHON_IMAGE={PYTHON_IMAGE}", f"--build-arg=TRITON_IMAGE={TRITON}"),
            *("--target=sagemaker", f"--tag={SAGEMAKER}", str(ROOT)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return SAGEMAKER


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, and a slow model."""
    folder = tmp_path_factory.mktemp("models")
    for example in EXAMPLES.iterdir():
        (folder / example.name).mkdir()
        subprocess.run(["cp", "-r", f"{example}/.", folder / example.name], check=True)
    write_python_model(folder / "slow", answer=SLOW)
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def stack(engine: DockerClient, images: dict[str, str], models: Path) -> Iterator[Stack]:
    environ = images | {"MODELS_DIR": str(models), "ADAPTER_MEMORY_LIMIT": "2GiB"}
    with running(engine, environ) as up:
        yield up
