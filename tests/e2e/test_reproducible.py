"""Two builds of an image, some time apart, have the same digest."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.stack import BUILD_CA, PYTHON_IMAGE, ROOT

EPOCH = "1700000000"


@pytest.fixture(autouse=True)
def rewriting_store(engine):
    """The store of images that can rewrite the times of files."""
    if engine.info()["DriverStatus"] != [["driver-type", "io.containerd.snapshotter.v1"]]:
        pytest.skip("the engine has no containerd image store")


def digest(target: str, triton: str, folder: Path, *options: str) -> str:
    about = folder / "about.json"
    done = subprocess.run(
        [
            *("docker", "buildx", "build", "--network=host", f"--secret=id=ca,src={BUILD_CA}"),
            *(f"--build-arg=PYTHON_IMAGE={PYTHON_IMAGE}", f"--build-arg=TRITON_IMAGE={triton}"),
            *("--provenance=false", "--output=type=oci,dest=-,rewrite-timestamp=true"),
            *(f"--metadata-file={about}", f"--target={target}", *options, str(ROOT)),
        ],
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
        stdout=subprocess.DEVNULL,  # the image
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return str(json.loads(about.read_text())["containerimage.digest"])


@pytest.mark.parametrize("target", ["adapter", "sagemaker"])
def test_two_image_builds_have_the_same_digest(images, sagemaker_image, target, tmp_path):
    """The first is the build that the other tests use, with the times of its files rewritten."""
    triton = images["TRITON_CPU_IMAGE"]

    first = digest(target, triton, tmp_path)

    assert first == digest(target, triton, tmp_path, "--no-cache")
