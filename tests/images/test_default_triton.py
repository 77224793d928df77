"""The chart, compose.yaml, the Dockerfile, the examples and the pages name one Triton."""

import re
import subprocess
from pathlib import Path

import yaml

from adapter.core.versions import DEFAULT_IMAGE

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"nvcr\.io/nvidia/tritonserver:[\w.-]+")
# a matrix of several, on purpose
SEVERAL = {".github/workflows/triton.yaml"}


def test_all_files_name_the_default_triton_image():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    named: dict[str, set[str]] = {}
    for name in {*listed.stdout.decode().split("\0")} - {"", *SEVERAL}:
        text = (
            (ROOT / name).read_bytes().decode(errors="replace") if (ROOT / name).is_file() else ""
        )
        if found := set(NAMED.findall(text)):
            named[name] = found
    assert {"Dockerfile", "compose.yaml", "docs/containers.md", "docs/triton.md"} <= named.keys()
    assert {name: found for name, found in named.items() if found != {DEFAULT_IMAGE}} == {}


def test_chart_has_the_default_triton_image():
    image = yaml.safe_load((ROOT / "charts/triton-adapter/values.yaml").read_text())["triton"][
        "image"
    ]
    assert "{registry}/{repository}:{tag}".format(**image) == DEFAULT_IMAGE
