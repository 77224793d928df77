"""`make release-dry-run`, and the workflows, which nobody has run: what reading them can show."""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from adapter.core.versions import DEFAULT_IMAGE
from scripts import release

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


def test_default_triton_is_one_of_the_tested():
    text = (ROOT / ".github/workflows/triton.yaml").read_text(encoding="utf-8")
    tags = yaml.safe_load(text)["jobs"]["test"]["strategy"]["matrix"]["image"]
    assert DEFAULT_IMAGE.rpartition(":")[2] in tags


def test_workflow_publishes_what_the_dry_run_made():
    steps = " ".join(step for step in release.STEPS if step != "images")
    command = f'make release-dry-run TAG="$GITHUB_REF_NAME" STEPS="{steps}"'

    assert command in commands("check")
    assert "--predicate dist/release/triton-adapter.cdx.json" in commands("images")
    assert 'helm push "dist/release/triton-adapter-' in commands("chart")
    for job in ("check", "images", "chart"):
        folders = [step.get("with", {}).get("path") for step in JOBS[job]["steps"]]
        assert "dist/release" in folders


def test_nothing_is_pushed_before_the_checks_have_passed():
    assert JOBS["images"]["needs"] == "check"
    assert JOBS["chart"]["needs"] == "images"
    for target in ("check", "test", "e2e"):
        assert re.search(rf"^make {target}$", commands("check"), re.MULTILINE)


def test_each_built_target_is_in_the_dockerfile():
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    targets = [each["target"] for each in JOBS["images"]["strategy"]["matrix"]["include"]]
    assert targets == ["adapter", "sagemaker"]
    for target in targets:
        assert f" AS {target}\n" in dockerfile


# -- the script ---------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> release.Release:
    """A copy of the files that have a version, in a repository of its own."""
    root = tmp_path / "tree"
    shutil.copytree(ROOT / release.CHART, root / release.CHART)
    for name in ("pyproject.toml", "Dockerfile", "CHANGELOG.md"):
        shutil.copy(ROOT / name, root / name)
    author = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    for command in (("init", "-q"), ("add", "-A"), (*author, "commit", "-q", "-m", "all")):
        subprocess.run(["git", *command], cwd=root, check=True)
    (out := tmp_path / "out").mkdir()
    return release.Release(root, out, None)


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")


def test_tag_project_chart_and_images_have_one_version(tree):
    tagged = replace(tree, tag=f"v{tree.version}")

    outcome = release.check_versions(tagged)

    assert outcome.gaps == []
    assert tree.version in outcome.artifacts[0]


def test_another_tag_is_refused(tree):
    with pytest.raises(release.StepFailedError, match=r"the tag is v9\.9\.9"):
        release.check_versions(replace(tree, tag="v9.9.9"))


@pytest.mark.parametrize(
    ("file", "before"),
    [
        (str(release.CHART / "Chart.yaml"), "\nversion: "),
        (str(release.CHART / "Chart.yaml"), "\nappVersion: "),
        ("Dockerfile", "\nARG VERSION="),
    ],
)
def test_a_file_with_another_version_is_refused(tree, file, before):
    edit(tree.root / file, f"{before}{tree.version}", f"{before}9.9.9")

    with pytest.raises(release.StepFailedError, match=r"9\.9\.9"):
        release.check_versions(tree)


def test_uncommitted_files_are_reported(tree):
    (tree.root / "new").touch()

    assert any("not committed" in gap for gap in release.check_versions(tree).gaps)


def test_notes_are_the_section_of_the_version(tree):
    title = f"## [{tree.version}] - 2026-12-01"
    older = "## [0.0.1]\n\n- Old.\n"
    (tree.root / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## [Unreleased]\n\n{title}\n\n### Added\n\n- One.\n\n{older}"
    )

    assert release.write_notes(replace(tree, tag=f"v{tree.version}")).gaps == []
    assert (tree.folder / "release-notes.txt").read_text() == "### Added\n\n- One.\n"


def test_unreleased_changes_do_without_a_tag_alone(tree):
    (tree.root / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- Two.\n")

    assert "those of Unreleased" in release.write_notes(tree).gaps[0]
    assert (tree.folder / "release-notes.txt").read_text() == "- Two.\n"
    with pytest.raises(release.StepFailedError, match="no section"):
        release.write_notes(replace(tree, tag=f"v{tree.version}"))


def test_one_commit_makes_the_same_chart_twice(tree):
    """Helm writes the times of the files into the archive, which differ in each clone."""
    name = f"triton-adapter-{tree.version}.tgz"
    release.package_chart(tree)
    first = (tree.folder / name).read_bytes()
    for path in (tree.root / release.CHART).rglob("*"):
        os.utime(path, (1, 1))
    release.package_chart(tree)

    assert (tree.folder / name).read_bytes() == first
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        names = archive.getnames()
    assert "triton-adapter/files/alerts.yaml" in names
    assert not any(path.startswith("triton-adapter/ci/") for path in names)


def test_a_chart_that_helm_cannot_read_is_refused(tree):
    (tree.root / release.CHART / "templates/broken.yaml").write_text("{{ if }}")

    with pytest.raises(release.StepFailedError, match="broken"):
        release.package_chart(tree)


def fail(_: release.Release) -> release.Outcome:
    raise release.StepFailedError("the reason")


def succeed(_: release.Release) -> release.Outcome:
    return release.Outcome(artifacts=["a thing"], gaps=["another thing"])


def test_failed_step_is_named_and_others_are_tried(tree, monkeypatch, capsys):
    monkeypatch.setattr(release, "STEPS", {"first": fail, "second": succeed})

    assert release.run_steps(tree, ["first", "second"]) == 1
    printed = capsys.readouterr().out
    assert "the reason" in printed
    assert "made:\n  a thing (second, 0 s)" in printed
    assert "not done here:\n  another thing (second)" in printed
    assert "FAILED:\n  first" in printed
    assert release.run_steps(tree, ["second"]) == 0


def test_images_are_a_gap_without_an_engine(tree):
    """scripts/engine.sh does nothing and is content where no engine can be started."""
    script = tree.root / "scripts/engine.sh"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho no engine can be started here: not root >&2\n")
    script.chmod(0o755)

    outcome = release.build_images(tree)

    assert outcome == release.Outcome(gaps=["images: no engine can be started here: not root"])


def test_site_is_that_of_make(tree):
    """The Makefile knows the steps of the site, which have changed before."""
    lines = "site:\n\tmkdir -p dist/site\n\techo page > dist/site/index.html\n"
    (tree.root / "Makefile").write_text(lines)

    outcome = release.build_site(tree)

    assert outcome.artifacts == ["site/, 1 pages"]
    assert (tree.folder / "site/index.html").read_text() == "page\n"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_sdist_makes_a_wheel_that_serves(tmp_path):
    outcome = release.build_packages(release.Release(ROOT, tmp_path, None))

    assert [line.partition(",")[0] for line in outcome.artifacts] == sorted(
        path.name for path in tmp_path.iterdir()
    )[::-1]
