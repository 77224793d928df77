"""The image of the adapter: what it holds, and that it asks nothing of where it runs."""

import json
import subprocess
from contextlib import closing

import pytest

from tests.e2e.stack import PYTHON_IMAGE, ROOT, running


def run(engine, image: str, *command: str, **options: object) -> str:
    """What it wrote, in a container with nothing to write to and no privilege."""
    said = engine.containers.run(
        image,
        list(command),
        remove=True,
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        network_disabled=True,
        **options,
    )
    return said.decode()


@pytest.fixture
def image(images):
    return images["ADAPTER_IMAGE"]


def test_default_user_is_a_number_other_than_root(engine, image):
    assert engine.images.get(image).attrs["Config"]["User"] == "65532:65532"


def test_there_is_no_pip(engine, image):
    code = "import importlib.util as u; print(u.find_spec('pip'), u.find_spec('ensurepip'))"
    assert run(engine, image, "-I", "-c", code, entrypoint="python3") == "None None\n"


def test_bill_of_materials_names_the_images_contents(engine, image):
    """`make sbom` installs the lock with this Python; names and versions must be the image's.

    So neither pip is there nor anything that only tests need.
    """
    made = subprocess.run([ROOT / "scripts/sbom.sh"], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    bill = json.loads((ROOT / "dist/triton-adapter.cdx.json").read_text())
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps([(d.metadata['Name'], d.version) for d in m.distributions()]))"
    )

    there = json.loads(run(engine, image, "-c", code, entrypoint="/opt/adapter/bin/python"))

    billed = [bill["metadata"]["component"], *bill["components"]]
    assert {(one["name"], one["version"]) for one in billed} == {*map(tuple, there)}
    assert next(one for one in billed if one["name"] == "aiohttp")["licenses"]


def test_labels_say_what_it_is(engine, image):
    labels = engine.images.get(image).labels

    assert labels["org.opencontainers.image.title"] == "triton-adapter"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.base.name"] == PYTHON_IMAGE
    said = run(engine, image, "version").split()[1]
    assert labels["org.opencontainers.image.version"] == said


def test_it_serves_as_a_user_that_nobody_knows(engine, images, models, tmp_path):
    """In the place of compose.yaml's own, which is 65532."""
    override = tmp_path / "user.yaml"
    override.write_text("services: {adapter: {user: '1000730000:4242'}}")

    with (
        running(engine, images | {"MODELS_DIR": str(models)}, override) as stack,
        closing(stack.client()) as client,
    ):
        host = stack.container("adapter").attrs["HostConfig"]
        assert (host["ReadonlyRootfs"], host["CapDrop"]) == (True, ["ALL"])
        assert client.load("identity", "/models/local/identity").status == 200
        assert client.delete("/models/identity").status == 200
