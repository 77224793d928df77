"""A process that is killed in the midst of staging leaves nothing that nobody owns.

A child stages and removes packages; it is killed before the first step that changes the disk, in
another run before the second one, and so on until it gets through. Of an archive, each life of
which unpacks in another process, before every fourth step.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.packages.staged import CONFIG, ensemble, make, tree

ROOT = Path(__file__).parents[2]

# Audit events come before the deed; rmtree and open come down to these on every Python.
DRIVER = """
import asyncio, itertools, os, shutil, signal, sys, traceback
import concurrent.futures.thread
from pathlib import Path
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.packages.staging import Packages

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "open"}
root, repository, url = map(Path, sys.argv[1:4])
stride = int(sys.argv[4])
NAME, ID = TritonName("m"), ModelId("m")
HELD = {"host": 7}

def phase(what):
    (root.parent / "phase").write_text(what)

def kill_at(step):
    steps = itertools.count(1)
    def look(event, given):
        if event not in CHANGES or (event == "open" and not given[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if str(given[0]).endswith("/phase"):
            return
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(look)

async def live(packages):
    source = ModelSource(str(url), entry="whole")
    for again in (False, True):
        phase("staging")
        package = await packages.prepare(NAME, ID, source)
        placement = await packages.place(NAME, ID, package)
        phase("confirming")
        await packages.confirm(NAME, source, package.content_key, HELD)
        phase("serving")
        await packages.confirm(NAME, source, package.content_key, HELD)
        if again:
            phase("removing")
            await packages.remove(NAME)
    phase("done")

async def start_again(packages):
    before = (root.parent / "phase").read_text()
    staged = await packages.staged()
    assert len(staged) <= 1, staged
    for model in staged:
        assert model.name == NAME and model.model_id == ID
        there = {path.name for path in repository.iterdir()}
        if model.is_loaded:
            assert model.held == HELD and model.source.url == str(url)
            assert there == set(model.placement.names), (there, model, before)
            assert all((repository / name / "config.pbtxt").exists() for name in there)
        else:
            assert before != "serving", before
    for model in staged:
        await packages.remove(model.name)
    assert list(repository.iterdir()) == []

def in_child(act, step=None):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 1
    try:
        if step is not None:
            kill_at(step)
        asyncio.run(act(Packages(repository, [root])))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)

for step in itertools.count(1, stride):
    status = in_child(live, step)
    if os.waitstatus_to_exitcode(status) not in {0, -signal.SIGKILL}:
        sys.exit(f"step {step}: the life failed")
    if in_child(start_again) != 0:
        sys.exit(f"step {step}: " + (root.parent / "phase").read_text())
    if status == 0:
        print(step)
        break
"""


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        ("archive", 12),
        pytest.param("folder", 1, marks=pytest.mark.nightly),
        pytest.param("archive", 4, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_process_leaves_only_removable_files(kind, stride, tmp_path):
    root, repository = tmp_path / "models", tmp_path / "repository"
    repository.mkdir()
    make(root / "m" / "one")
    make(root / "m" / "two", CONFIG)
    make(root / "m" / "whole", ensemble("one"))
    url = root / "m"
    if kind == "archive":
        subprocess.run(["tar", "-cf", root / "m.tar", "-C", root / "m", "."], check=True)
        url = root / "m.tar"
    before = tree(root)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DRIVER), root, repository, url, f"{stride}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40
    assert tree(root) == before
    assert tree(repository) == {}
