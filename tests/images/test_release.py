"""The workflows, which nobody has run: what can be said of them by reading."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from adapter.core.versions import DEFAULT_IMAGE

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
WORKFLOW = ROOT / ".github/workflows/release.yaml"
TEXT = WORKFLOW.read_text(encoding="utf-8")
JOBS = yaml.safe_load(TEXT)["jobs"]
ACTIONLINT = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.12"


def commands(job: str) -> str:
    return "\n".join(step.get("run", "") for step in JOBS[job]["steps"])


@pytest.fixture(scope="module")
def actionlint(request: pytest.FixtureRequest) -> str:
    """The program on PATH, or one that Go builds once into pytest's cache."""
    if found := shutil.which("actionlint"):
        return found
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("actionlint")
    if not (folder / "actionlint").exists():
        try:
            subprocess.run(
                ["go", "install", ACTIONLINT],
                env={**os.environ, "GOBIN": str(folder)},
                capture_output=True,
                timeout=100,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"actionlint cannot be had: {error}")
    return str(folder / "actionlint")


@pytest.mark.nightly
def test_actionlint_and_shellcheck_have_nothing_to_say(actionlint):
    shellcheck = Path(sys.executable).with_name("shellcheck")

    done = subprocess.run(
        [actionlint, f"-shellcheck={shellcheck}", *WORKFLOWS],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_it_says_that_it_was_never_run(workflow):
    assert "THIS WORKFLOW HAS NEVER BEEN RUN" in workflow.read_text(encoding="utf-8")


def test_the_default_triton_is_among_those_that_the_tests_run_on():
    text = (ROOT / ".github/workflows/triton.yaml").read_text(encoding="utf-8")
    tags = yaml.safe_load(text)["jobs"]["test"]["strategy"]["matrix"]["image"]
    assert DEFAULT_IMAGE.rpartition(":")[2] in tags


def test_nothing_is_pushed_before_the_checks_have_passed():
    assert JOBS["wheel"]["needs"] == "check"
    assert JOBS["images"]["needs"] == "check"
    assert JOBS["chart"]["needs"] == "images"
    for target in ("check", "test", "e2e"):
        assert re.search(rf"^make {target}$", commands("check"), re.MULTILINE)


def test_images_are_pushed_with_bases_by_digest_bill_of_materials_and_provenance():
    pushing = commands("images").partition("--metadata-file=built.json")[0]
    for option in (
        '--build-arg=PYTHON_DIGEST="$PYTHON_DIGEST"',
        '--build-arg=TRITON_DIGEST="$TRITON_DIGEST"',
        '--platform="$PLATFORMS"',
        "--sbom=true",
        "--provenance=mode=max",
        "push=true,rewrite-timestamp=true",
    ):
        assert option in pushing


def test_each_target_that_it_builds_is_in_the_dockerfile():
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    targets = [each["target"] for each in JOBS["images"]["strategy"]["matrix"]["include"]]
    assert targets == ["adapter", "sagemaker"]
    for target in targets:
        assert f" AS {target}\n" in dockerfile


def test_images_and_chart_are_signed_by_digest():
    assert 'cosign sign --yes "$IMAGE@$DIGEST"' in commands("images")
    assert 'cosign sign --yes "$charts/triton-adapter@$digest"' in commands("chart")
