"""Builds what a release publishes into dist/release, and tries it. Publishes nothing.

    release.py                     run all steps, as `make release-dry-run` does
    release.py versions chart      run these steps only
    release.py --tag v0.1.0 ...    also require that the version is that of the tag

The list at the end has two parts: what was made, and what could not be done here, such as images
without a container engine. The exit code is 1 if a step failed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = Path("charts/triton-adapter")
LINT_ERROR = 3  # the severity of an error in the report of `helm lint`
START_SECONDS = 30
STOP_SECONDS = 30
# listeners on free ports, and a Triton that is not there
SERVE_FLAGS = (
    *("--http=127.0.0.1:0", "--grpc=127.0.0.1:0", "--admin=127.0.0.1:0"),
    *("--triton-http=127.0.0.1:1", "--triton-grpc=127.0.0.1:1", "--triton-metrics=127.0.0.1:1"),
    "--log-format=json",
)


class StepFailedError(Exception):
    """A step found something that must be mended before a release."""


@dataclass
class Outcome:
    """Keeps the results of a step for the list at the end."""

    artifacts: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)  # steps that this machine cannot do


@dataclass(frozen=True)
class Release:
    """The tree that is released, where its artifacts go, and its tag if there is one."""

    root: Path
    folder: Path
    tag: str | None

    @property
    def version(self) -> str:
        """Return the version that pyproject.toml has."""
        text = (self.root / "pyproject.toml").read_text("utf-8")
        return str(tomllib.loads(text)["project"]["version"])


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command and return what it printed. Raise StepFailedError with its last words."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise StepFailedError(
            f"{' '.join(map(str, command))}: exit code {done.returncode}\n{words}"
        )
    return done.stdout


def read_commit_time(root: Path) -> str:
    """Return the time of the commit in seconds. Archives get it, so that anybody makes the same."""
    return run("git", "log", "-1", "--format=%ct", cwd=root).strip()


# -- versions -----------------------------------------------------------------------------------


def find_version_faults(release: Release) -> Iterator[str]:
    """Find the places whose version is not that of pyproject.toml."""
    version = release.version
    if release.tag is not None and release.tag != f"v{version}":
        yield f"the tag is {release.tag}, pyproject.toml has {version}"
    chart = yaml.safe_load((release.root / CHART / "Chart.yaml").read_text("utf-8"))
    for key in ("version", "appVersion"):
        if str(chart[key]) != version:
            yield f"{key} of {CHART}/Chart.yaml is {chart[key]}, pyproject.toml has {version}"
    dockerfile = (release.root / "Dockerfile").read_text("utf-8")
    labels = re.findall(r"^ARG VERSION=(.*)$", dockerfile, re.MULTILINE)
    if set(labels) != {version}:
        yield f"ARG VERSION of the Dockerfile is {', '.join(labels)}, pyproject.toml has {version}"


def check_versions(release: Release) -> Outcome:
    """Check that tag, project, chart and images have one version, and that all is committed."""
    if faults := list(find_version_faults(release)):
        raise StepFailedError("\n".join(faults))
    outcome = Outcome(
        artifacts=[f"version {release.version} in pyproject.toml, Chart.yaml and Dockerfile"]
    )
    if release.tag is None:
        outcome.gaps.append(f"no tag to check; it would be v{release.version}")
    if run("git", "status", "--porcelain", cwd=release.root):
        outcome.gaps.append("files are not committed: the tag would not have them")
    return outcome


# -- the release's notes ------------------------------------------------------------------------


def cut_section(changelog: str, name: str) -> str | None:
    """Return the text below the title `## [name]`, or None if it is missing or empty."""
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE):
        title, _, text = section.partition("\n")
        if title.startswith(f"[{name}]") and text.strip():
            return text.strip() + "\n"
    return None


def write_notes(release: Release) -> Outcome:
    """Write the changelog's section of this version. Without a tag *Unreleased* will do."""
    changelog = (release.root / "CHANGELOG.md").read_text("utf-8")
    outcome = Outcome()
    section = cut_section(changelog, release.version)
    if section is None and release.tag is None:
        section = cut_section(changelog, "Unreleased")
        outcome.gaps.append(
            f"CHANGELOG.md has no section of {release.version}: the notes are those of Unreleased"
        )
    if section is None:
        raise StepFailedError(f"CHANGELOG.md has no section '## [{release.version}]'")
    (release.folder / "release-notes.txt").write_text(section, "utf-8")
    outcome.artifacts.append("release-notes.txt")
    return outcome


# -- sdist and wheel ----------------------------------------------------------------------------


def build_packages(release: Release) -> Outcome:
    """Build the sdist, the wheel from the unpacked sdist, and try the wheel in an empty venv."""
    source_time = {"SOURCE_DATE_EPOCH": read_commit_time(release.root)}
    build = (sys.executable, "-m", "hatchling", "build", "-d", release.folder, "-t")
    run(*build, "sdist", cwd=release.root, **source_time)
    name = f"triton_adapter-{release.version}"
    sdist = release.folder / f"{name}.tar.gz"
    wheel = release.folder / f"{name}-py3-none-any.whl"
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(sdist, folder, filter="data")
        run(*build, "wheel", cwd=Path(folder) / name, **source_time)
        program = install_wheel(wheel, Path(folder) / "venv", release.root)
        try_commands(program, release.version, Path(folder))
        try_serving(program, Path(folder))
    return Outcome(artifacts=[sdist.name, f"{wheel.name}, installed and tried in an empty venv"])


def install_wheel(wheel: Path, folder: Path, root: Path) -> Path:
    """Install the wheel beside the locked packages, and return the program that it brings."""
    venv.create(folder, with_pip=True)
    pip = (folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet")
    locked = ("--require-hashes", "-r", "requirements/adapter.txt")
    run(*pip, "install", "--no-deps", *locked, cwd=root)
    run(*pip, "install", "--no-deps", wheel, cwd=root)
    run(*pip, "check", cwd=root)
    return folder / "bin/triton-adapter"


def try_commands(program: Path, version: str, folder: Path) -> None:
    """Run the commands that need no Triton. The folder keeps the source out of Python's path."""
    printed = run(program, "version", cwd=folder)
    if version not in printed.split():
        raise StepFailedError(f"`triton-adapter version` printed {printed!r} instead of {version}")
    run(program, "version", "--all", cwd=folder)
    run(program, "check-config", cwd=folder)
    run(program, "serve", "--help", cwd=folder)


def try_serving(program: Path, folder: Path) -> None:
    """Start the adapter without a Triton: it is alive, not ready, and ends on SIGTERM."""
    with open_process(
        program, "serve", *SERVE_FLAGS, f"--repository={folder}/repository"
    ) as process:
        address = wait_for_address(process)
        expect_status(address, "/livez", HTTPStatus.OK)
        expect_status(address, "/readyz", HTTPStatus.SERVICE_UNAVAILABLE)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_SECONDS)
    if process.returncode != 0:
        raise StepFailedError(f"the adapter ended with {process.returncode} after SIGTERM")


@contextmanager
def open_process(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process whose output can be read, and kill it if it is still there at the end."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/"
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_address(process: subprocess.Popen[str]) -> str:
    """Return where the listener `admin` is, as the adapter logs it."""
    lines: list[str] = []
    deadline = time.monotonic() + START_SECONDS
    for line in process.stdout or ():
        lines.append(line)
        event = json.loads(line) if line.startswith("{") else {}
        if (event.get("event"), event.get("listener")) == ("adapter.listening", "admin"):
            return str(event["address"])
        if time.monotonic() > deadline:
            break
    raise StepFailedError("the installed adapter does not listen:\n" + "".join(lines[-15:]))


def expect_status(address: str, path: str, expected: HTTPStatus) -> None:
    """Raise StepFailedError unless a GET is answered with this status."""
    connection = HTTPConnection(address, timeout=10)
    with closing(connection):
        connection.request("GET", path)
        status = connection.getresponse().status
    if status != expected:
        raise StepFailedError(f"{path} of the installed adapter answered {status}, not {expected}")


# -- the chart ----------------------------------------------------------------------------------


def package_chart(release: Release) -> Outcome:
    """Check and package the chart with Helm's own SDK. The same commit makes the same bytes."""
    import helm_python  # noqa: PLC0415  # other steps run without it

    report: dict[str, Any] = helm_python.lint(release.root / CHART, strict=True)
    faults = [found for found in report["messages"] if found["severity"] >= LINT_ERROR]
    if faults or report["errors"]:
        raise StepFailedError(f"helm lint --strict: {faults or report['errors']}")
    commit_time = int(read_commit_time(release.root))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(release.root / CHART, Path(folder) / CHART.name))
        for path in copy.rglob("*"):
            os.utime(path, (commit_time, commit_time))
        package = Path(helm_python.package(copy, destination=release.folder))
    chart = helm_python.Chart.load_archive(package.read_bytes())
    versions = (chart.metadata["version"], chart.metadata["appVersion"])
    if versions != (release.version, release.version):
        raise StepFailedError(f"the packaged chart has {versions} instead of {release.version}")
    if not chart.render({}, name="release"):
        raise StepFailedError("the packaged chart renders nothing")
    return Outcome(artifacts=[f"{package.name}, version and appVersion {release.version}"])


# -- bill of materials, site, images ------------------------------------------------------------


def write_sbom(release: Release) -> Outcome:
    """Write the bill of materials of what the images add to their bases."""
    commit_time = read_commit_time(release.root)
    run("scripts/sbom.sh", cwd=release.root, SOURCE_DATE_EPOCH=commit_time)
    name = "triton-adapter.cdx.json"
    written = release.folder / name
    shutil.copy2(release.root / "dist" / name, written)
    packages = json.loads(written.read_text("utf-8"))["components"]
    return Outcome(artifacts=[f"{name}, {len(packages)} packages"])


def build_site(release: Release) -> Outcome:
    """Build the published pages of the docs. A dead link or anchor is a failure."""
    run("make", "site", cwd=release.root)
    folder = release.folder / "site"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(release.root / "dist/site", folder)
    pages = sum(1 for _ in folder.rglob("*.html"))
    return Outcome(artifacts=[f"site/, {pages} pages"])


def build_images(release: Release) -> Outcome:
    """Build the images where a container engine answers or can be started, and try `adapter`."""
    report = release.folder / "images.txt"
    report.unlink(missing_ok=True)
    inner = (sys.executable, Path(__file__).resolve(), "build-in-engine", f"--out={release.folder}")
    done = subprocess.run(
        ["scripts/engine.sh", *inner],
        cwd=release.root,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise StepFailedError("\n".join(done.stderr.strip().splitlines()[-15:]))
    if not report.exists():
        return Outcome(gaps=[f"images: {done.stderr.strip()}"])
    lines = report.read_text("utf-8").splitlines()
    refusals = [line for line in lines if line.startswith("not built: ")]
    return Outcome(artifacts=[line for line in lines if line not in refusals], gaps=refusals)


def build_in_engine(release: Release) -> Outcome:
    """Build `adapter` and `sagemaker` with the engine that scripts/engine.sh has found."""
    lines = [build_image(release, "adapter", "triton-adapter")]
    printed = run(
        "docker", "run", "--rm", name_image(release, "adapter"), "version", cwd=release.root
    )
    if release.version not in printed.split():
        raise StepFailedError(f"the image `adapter` says {printed!r} instead of {release.version}")
    try:
        lines.append(build_image(release, "sagemaker", "triton-adapter-sagemaker"))
    except StepFailedError as error:
        if "failed to resolve source metadata" not in str(error):
            raise
        lines.append("not built: sagemaker, whose base TRITON_IMAGE cannot be fetched here")
    (release.folder / "images.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return Outcome(artifacts=lines)


def name_image(release: Release, target: str) -> str:
    """Return the local name of an image."""
    return f"triton-adapter-release/{target}:{release.version}"


def build_image(release: Release, target: str, title: str) -> str:
    """Build one target of the Dockerfile for this machine, and return a line about it."""
    options = ["--network=host", f"--target={target}", f"--tag={name_image(release, target)}"]
    options.append(f"--build-arg=VERSION={release.version}")
    options.append(f"--secret=id=ca,src={os.environ.get('PIP_CERT') or os.devnull}")
    options += [
        f"--build-arg={name}={os.environ[name]}"
        for name in ("PYTHON_IMAGE", "TRITON_IMAGE", "PIP_INDEX_URL")
        if os.environ.get(name)
    ]
    run("docker", "buildx", "build", "--load", *options, ".", cwd=release.root)
    inspect = ("docker", "image", "inspect", "--format", "{{json .}}", name_image(release, target))
    image = json.loads(run(*inspect, cwd=release.root))
    label = image["Config"]["Labels"]["org.opencontainers.image.version"]
    if label != release.version:
        raise StepFailedError(f"the image `{target}` has the version {label}")
    return f"image {title}:{label}, {image['Size'] / 1e6:.0f} MB, version tried"


STEPS: dict[str, Callable[[Release], Outcome]] = {
    "versions": check_versions,
    "notes": write_notes,
    "packages": build_packages,
    "chart": package_chart,
    "sbom": write_sbom,
    "site": build_site,
    "images": build_images,
}


def run_steps(release: Release, steps: Sequence[str]) -> int:
    """Run the steps, print what they made, and return the exit code. Each is tried."""
    artifacts: list[str] = []
    gaps: list[str] = []
    failed: list[str] = []
    for name in steps:
        started_at = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            outcome = STEPS[name](release)
        except (StepFailedError, OSError, subprocess.SubprocessError) as error:
            print(error, flush=True)
            failed.append(name)
            continue
        seconds = time.monotonic() - started_at
        artifacts += [f"{line} ({name}, {seconds:.0f} s)" for line in outcome.artifacts]
        gaps += [f"{line} ({name})" for line in outcome.gaps]
    for title, lines in (("made", artifacts), ("not done here", gaps), ("FAILED", failed)):
        if lines:
            print(f"\n{title}:", *lines, sep="\n  ")
    print(f"\nall is in {release.folder}; nothing was published", flush=True)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run the steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--tag", help="the tag of the release, such as v0.1.0")
    parser.add_argument("--out", type=Path, default=ROOT / "dist/release")
    options = parser.parse_args(arguments)
    release = Release(ROOT, options.out.resolve(), options.tag or None)
    release.folder.mkdir(parents=True, exist_ok=True)
    if options.steps == ["build-in-engine"]:
        build_in_engine(release)
        return 0
    if unknown := set(options.steps) - STEPS.keys():
        parser.error(f"no such step: {', '.join(sorted(unknown))}; known: {', '.join(STEPS)}")
    return run_steps(release, options.steps or list(STEPS))


if __name__ == "__main__":
    sys.exit(main())
