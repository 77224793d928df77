"""The first minutes of somebody new, on a clean Debian as a plain user: the pages, line by line."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path

import pytest

from tests.docs.pages import README, ROOT, Block, blocks, shown
from tests.docs.place import free_listeners, objects
from tests.nightly.debian import Debian, Machine, debian, wait_for

pytestmark = pytest.mark.timeout(1800)

PAGES = [
    README,
    *(ROOT / page for page in ("docs/quickstart.md", "docs/operations.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
NEEDED = ("make", "curl", "python3", "python3-venv")
READY = ".venv/bin/triton-adapter wait --timeout=1 >/dev/null 2>&1"


@pytest.fixture(scope="module")
def bookworm() -> Iterator[Debian]:
    with debian("bookworm", *NEEDED) as made:
        yield made


@pytest.fixture(scope="module")
def clone(bookworm: Debian) -> str:
    """A clone in which `make run` has been called once."""
    path = bookworm.clone("clone")
    with bookworm.up() as machine:
        code, said = machine.run("make setup-run", path)
    assert code == 0, said
    return path


@contextmanager
def serving(
    machine: Machine, script: str, folder: str, log: Path, **variables: str
) -> Iterator[None]:
    """The script goes on, as in a terminal of its own, until Ctrl-C."""
    process = machine.start(script, folder, log=log, **variables)
    try:
        yield
    finally:
        # nsenter has a child in there, which has the group of its session, out here and in there
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(45)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def first_answer(machine: Machine, folder: str, log: Path) -> tuple[float, str]:
    """Seconds from `make run` to the labels of the first request, and what make said."""
    at = free_listeners()
    names = {"HTTP": at["http"], "ADMIN": at["admin"], "GRPC": at["grpc"]}
    arguments = " ".join(f"{name}={address}" for name, address in names.items())
    load = f'{{"model_name": "digits", "url": "{folder}/examples/models/digits"}}'
    ask = (
        f"curl -sf -X POST {at['http']}/models -d '{load}' &&"
        f" curl -sf {at['http']}/models/digits/invoke --data @examples/models/digits/sample.json"
    )
    begun = time.monotonic()
    with serving(machine, f"exec make run {arguments}", folder, log):
        wait_for(machine, folder, f"curl -sf {at['admin']}/readyz", 600, {"make run": log})
        code, said = machine.run(ask, folder)
        seconds = time.monotonic() - begun
        assert code == 0, said
        assert "[8,4,0,0,2,7,2,2]" in said
    return seconds, log.read_text()


def test_make_run_installs_once_and_answers(bookworm: Debian, clone: str, tmp_path: Path) -> None:
    """`clone` has warmed pip's cache."""
    fresh = bookworm.clone("fresh")
    with bookworm.up() as machine:
        first, said = first_answer(machine, fresh, tmp_path / "first")
        second, said_then = first_answer(machine, fresh, tmp_path / "second")

    sys.stdout.write(f"\nmake run to the first answer: {first:.1f} s, then {second:.1f} s\n")
    assert "setup: installing the packages of requirements/run.txt" in said
    assert "setup:" not in said_then
    assert second < first


def is_for_a_triton_of_their_own(block: Block) -> bool:
    """The README says how to put the adapter before a Triton; a clean Debian has none."""
    return "tritonserver " in block.text


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_the_lines_of_a_page_work_as_they_stand(
    bookworm: Debian, clone: str, page: Path, tmp_path: Path
) -> None:
    without_network = takewhile(lambda block: "make setup-demo" not in block.text, blocks(page))
    wanted = [
        block
        for block in without_network
        if (block.is_run_here or block.mode == "answer")
        and block.language != "python"  # for boto3, which the machine has no network to get
        and not is_for_a_triton_of_their_own(block)
    ]
    if not wanted:
        return
    with bookworm.up(is_apart=True) as machine:
        if not any(block.mode == "server" for block in wanted):
            with serving(machine, "exec make run", clone, tmp_path / "log"):
                wait_for(machine, clone, READY, 90, {"make run": tmp_path / "log"})
                walk(machine, clone, wanted, tmp_path / "log")
        else:
            walk(machine, clone, wanted, tmp_path / "log")


def walk(machine: Machine, folder: str, wanted: list[Block], log: Path) -> None:
    """Run the blocks in their order; one that serves ends the one before it."""
    said = ""
    with ExitStack() as server:
        for block in wanted:
            if block.mode == "answer":
                assert objects(block.text)[0] in objects(said), f"{block}: {said}"
            elif block.mode == "server":
                server.close()
                server.enter_context(serving(machine, f"{{ {block.text}\n}}", folder, log))
                wait_for(machine, folder, READY, 90, {str(block): log})
            else:
                said = run(machine, folder, block, log)


def run(machine: Machine, folder: str, block: Block, log: Path) -> str:
    code, said = machine.run(block.text, folder)
    errors = [one for one in objects(said) if isinstance(one, dict) and "error" in one]
    where = f"{block}: exit code {code}\n{said}\n{log.read_text()[-3000:] if log.exists() else ''}"
    assert bool(errors) == (block.mode == "refused"), where
    assert code == 0, where
    return said


@pytest.fixture(scope="module")
def trixie() -> Iterator[Debian]:
    """Whose only Python is 3.13."""
    with debian("trixie", *NEEDED) as made:
        yield made


@pytest.mark.parametrize("target", ["run", "demo"])
def test_debian_13_is_told_in_one_sentence_what_to_do(trixie: Debian, target: str) -> None:
    clone = trixie.clone("clone")
    with trixie.up() as machine:
        begun = time.monotonic()
        code, said = machine.run(f"make {target}", clone)
        seconds = time.monotonic() - begun
        script, _ = machine.run("scripts/setup.sh run", clone)

    sys.stdout.write(f"\nmake {target} with Python 3.13: refused after {seconds:.2f} s\n")
    assert (code, script) == (2, 2)
    sentence, of_make = said.splitlines()
    assert re.search(
        r"^setup: Python 3\.11 or 3\.12 is needed, and python3 is Python 3\.13", sentence
    )
    assert "uv python install 3.12" in sentence
    assert "make run PYTHON=" in sentence
    assert of_make.startswith("make: ***")
    assert not (trixie.folder / clone[1:] / ".venv").exists()
