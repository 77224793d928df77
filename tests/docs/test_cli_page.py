"""docs/cli.md can be pasted, and shows what the commands print."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import CLI, Block, blocks
from tests.docs.place import Place, place

_FIGURE = re.compile(r"\d+(\.\d+)?( [KMG]iB)?")
_NOT_ATTRIBUTED = re.compile(r"^(host( +[\d.]+ [KMG]iB){3}).*$", re.MULTILINE)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path / "page") as made:
        yield made


def shape(text: str) -> list[str]:
    """Return the lines without figures and blanks, which differ from run to run.

    Unaccounted memory is left out: it is only known at quiet moments.
    """
    bare = _FIGURE.sub("0", _NOT_ATTRIBUTED.sub(r"\1", text))
    return [" ".join(line.split()) for line in bare.strip().splitlines()]


def shown(block: Block) -> dict[str, str]:
    """Each command of the block, and what stands below it."""
    parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def run(here: Place, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        cwd=here.folder,
        env=here.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


def bare(said: str) -> str:
    """Without what is said of a command that takes long, as on a busy machine."""
    return re.sub(r"^(un)?load \w+: .*\n", "", said, flags=re.MULTILINE)


@pytest.mark.triton
def test_commands_print_what_the_page_shows(here: Place) -> None:
    for block in blocks(CLI):
        if block.mode == "server":
            here.serve(block)
        elif block.language == "console":
            for line, output in shown(block).items():
                done = run(here, line)
                assert shape(bare(done.stdout)) == shape(output), f"{block}: {line}"
                assert (done.returncode != 0) == (block.mode == "refused"), f"{block}: {line}"
        elif block.is_run_here:
            here.run(block)
