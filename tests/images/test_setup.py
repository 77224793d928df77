"""scripts/setup.sh with interpreters, and a uv, that only say what real ones would say.

The uv here was recorded: it cannot fetch an interpreter on every machine that runs the tests.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "cat", "cksum", "dirname", "grep", "rm", "sed", "tr")

# Takes the program that judges it from its standard input, as any interpreter does, with its own
# word on what it is; notes what pip would be asked for.
INTERPRETER = """#!{python}
import pathlib, platform, shutil, sys
arguments, version = sys.argv[1:], {version!r}
if arguments == ["-V"]:
    print("Python", version)
elif arguments == ["-"]:
    platform.python_version = lambda: version
    platform.python_implementation = lambda: {implementation!r}
    platform.machine = lambda: {machine!r}
    sys.version_info = tuple(map(int, version.split(".")))
    if {lacks!r}:
        sys.modules[{lacks!r}] = None
    exec(sys.stdin.read())
elif arguments[:2] == ["-m", "venv"]:
    folder = pathlib.Path(arguments[2], "bin")
    folder.mkdir(parents=True)
    shutil.copy(sys.argv[0], folder / "python")
else:
    with open({calls!r}, "a") as calls:
        print(*arguments, file=calls)
"""

UV = """#!/bin/sh
echo "uv $*" >> {calls}
case "$*" in
  'python install 3.12') [ -e {managed} ] && echo 'Installed Python 3.12.12 in 1.92s' >&2 ;;
  'python find '*' 3.12') echo {managed} ;;
  *) exit 9 ;;
esac
"""


@dataclass(frozen=True)
class Clone:
    """`bin` is all of PATH; `calls` has what pip and uv were asked for."""

    folder: Path
    bin: Path

    @property
    def calls(self) -> list[str]:
        path = self.folder.parent / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def pip(self) -> list[str]:
        return [call for call in self.calls if call.startswith("-m pip")]

    def interpreter(
        self,
        path: Path | str,
        version: str,
        *,
        implementation: str = "CPython",
        machine: str = "x86_64",
        lacks: str = "",
    ) -> Path:
        made = self.bin / path
        text = INTERPRETER.format(
            python=sys.executable,
            version=version,
            implementation=implementation,
            machine=machine,
            lacks=lacks,
            calls=str(self.folder.parent / "calls"),
        )
        made.write_text(text)
        made.chmod(0o755)
        return made

    def uv(self, managed: Path) -> None:
        calls = self.folder.parent / "calls"
        (self.bin / "uv").write_text(UV.format(calls=calls, managed=managed))
        (self.bin / "uv").chmod(0o755)

    def setup(self, *arguments: str, python: Path | str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / "scripts/setup.sh", *arguments],
            env={"PATH": str(self.bin), "PYTHON": str(python)},
            capture_output=True,
            text=True,
            check=False,
        )

    def forget_calls(self) -> None:
        (self.folder.parent / "calls").unlink()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    made = Clone(tmp_path / "clone", tmp_path / "bin")
    for folder in ("scripts", "requirements"):
        shutil.copytree(ROOT / folder, made.folder / folder)
    shutil.copy(ROOT / "pyproject.toml", made.folder)
    made.bin.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (made.bin / tool).symlink_to(found)
    return made


def refused(done: subprocess.CompletedProcess[str], clone: Clone) -> str:
    """What it said, in one line, after which nothing has been installed."""
    assert done.returncode == 2
    assert done.stdout == ""
    [said] = done.stderr.splitlines()
    assert not (clone.folder / ".venv").exists()
    assert clone.pip == []
    return said


@pytest.mark.parametrize(
    ("version", "about", "found"),
    [
        ("3.13.5", {}, "python3 is Python 3.13.5;"),
        ("3.10.13", {}, "python3 is Python 3.10.13;"),
        ("3.11.13", {"implementation": "PyPy"}, "python3 is PyPy 3.11.13;"),
        ("3.12.3", {"machine": "aarch64"}, "python3 is Python 3.12.3 for Linux on aarch64,"),
        ("3.11.2", {"lacks": "venv"}, "without the module venv (Debian, Ubuntu: apt-get install"),
        ("3.11.2", {"lacks": "ensurepip"}, "python3 is Python 3.11.2 without the module venv"),
    ],
)
def test_unusable_interpreter_is_refused_before_installing(
    clone: Clone, version: str, about: dict[str, str], found: str
) -> None:
    clone.interpreter("python3", version, **about)

    said = refused(clone.setup("run"), clone)

    assert found in said
    assert said.endswith(
        "get one, for example by `uv python install 3.12`, and name it:"
        ' make run PYTHON="$(uv python find 3.12)"'
    )


def test_without_any_interpreter_the_same_is_said(clone: Clone) -> None:
    assert "there is no python3; get one" in refused(clone.setup("run"), clone)


def test_named_interpreter_is_the_only_one_tried(clone: Clone) -> None:
    clone.interpreter("python3.12", "3.12.1")
    named = clone.interpreter("other", "3.13.0")

    assert f"{named} is Python 3.13.0;" in refused(clone.setup("run", python=named), clone)
    assert "PYTHON=python9 cannot be run" in refused(clone.setup("run", python="python9"), clone)


def test_supported_older_interpreter_beats_unsupported_newer(
    clone: Clone,
) -> None:
    clone.interpreter("python3", "3.13.5")
    clone.interpreter("python3.11", "3.11.2")

    done = clone.setup("run")

    assert done.returncode == 0, done.stderr
    assert "with Python 3.11.2" in done.stderr


def test_run_installs_its_packages_once(clone: Clone) -> None:
    clone.interpreter("python3", "3.12.1")

    assert clone.setup("run").returncode == 0
    installed = clone.pip
    clone.forget_calls()
    again = clone.setup("run")

    [install] = [call for call in installed if "requirements/run.txt" in call]
    assert "--quiet" in install  # there is no terminal
    assert [call for call in installed if "requirements/dev.txt" in call] == []
    assert (again.returncode, again.stderr, clone.calls) == (0, "", [])


def test_development_environment_serves_run_too(clone: Clone) -> None:
    clone.interpreter("python3", "3.12.1")

    assert clone.setup("run").returncode == 0
    assert clone.setup().returncode == 0
    assert [call for call in clone.pip if "requirements/dev.txt" in call]
    clone.forget_calls()
    assert clone.setup("run").returncode == 0
    assert clone.setup().returncode == 0

    assert clone.calls == []


def test_changed_lock_updates_the_environment(clone: Clone) -> None:
    clone.interpreter("python3", "3.12.1")
    clone.setup("run")
    kept = clone.folder / ".venv/kept"
    kept.touch()
    clone.forget_calls()
    with (clone.folder / "requirements/run.txt").open("a") as lock:
        lock.write("more==1.0\n")

    assert clone.setup("run").returncode == 0

    assert [call for call in clone.pip if "requirements/run.txt" in call]
    assert kept.exists()


def test_first_interpreter_is_kept_until_another_is_named(clone: Clone) -> None:
    first = clone.interpreter("first", "3.12.1")
    clone.interpreter("python3", "3.13.5")
    second = clone.interpreter("second", "3.11.2")

    assert clone.setup("run", python=first).returncode == 0
    clone.forget_calls()
    assert clone.setup("run").returncode == 0
    assert clone.calls == []
    done = clone.setup("run", python=second)

    assert done.returncode == 0
    assert "with Python 3.11.2" in done.stderr


def test_environment_of_unusable_interpreter_is_not_used(
    clone: Clone,
) -> None:
    clone.interpreter("python3", "3.12.1")
    assert clone.setup("run").returncode == 0
    clone.interpreter("python3", "3.13.5")
    shutil.copy(clone.bin / "python3", clone.folder / ".venv/bin/python")
    clone.forget_calls()

    done = clone.setup("run")

    assert done.returncode == 2
    assert "python3 is Python 3.13.5;" in done.stderr
    assert clone.calls == []


def test_uv_is_asked_for_a_missing_interpreter(clone: Clone) -> None:
    clone.interpreter("python3", "3.13.5")
    managed = clone.interpreter(clone.folder.parent / "managed", "3.12.12")
    clone.uv(managed)

    done = clone.setup("run")

    assert done.returncode == 0, done.stderr
    assert "python3 is Python 3.13.5; uv is asked for one" in done.stderr
    assert "with Python 3.12.12" in done.stderr
    assert [call for call in clone.calls if call.startswith("uv ")] == [
        "uv python install 3.12",
        "uv python find --system --python-preference only-managed 3.12",
    ]


def test_uv_without_interpreter_gives_the_same_sentence(clone: Clone) -> None:
    clone.interpreter("python3", "3.13.5")
    clone.uv(clone.folder / "not-there")

    done = clone.setup("run")

    assert done.returncode == 2
    assert "Python 3.13.5, and uv could not get another; get one" in done.stderr.splitlines()[-1]
    assert not (clone.folder / ".venv").exists()


def locked(name: str) -> dict[str, set[str]]:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for package, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE):
        found.setdefault(package, set()).add(version)
    return found


def test_run_needs_a_small_part_of_development() -> None:
    run, development = locked("run.txt"), locked("dev.txt")

    assert {package: development.get(package) for package in run} == run
    assert len(run) < len(development) * 0.6


def test_run_has_all_imports_of_command_and_examples() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["embedded"], *extras["examples"]]

    names = {re.split(r"[^\w.-]", one)[0] for one in wanted}

    assert names - set(locked("run.txt")) == set()
