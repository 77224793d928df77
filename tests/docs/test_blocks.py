"""Every block of a page that claims to be runnable is run, or says why it is not."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cases import rows
from tests.docs.pages import (
    CLI,
    DATA,
    README,
    ROOT,
    RUNNABLE,
    Block,
    blocks,
    pages,
    shown,
)
from tests.docs.place import Place, place
from tests.running import RunningAdapter, embedded_adapter, unload_all

BLOCKS = [block for page in pages() for block in blocks(page)]
RUN = [page for page in pages() if any(block.is_run_here for block in blocks(page))]
RUN.remove(README)  # which takes as long as all others: tests/docs/test_readme.py
RUN.remove(CLI)  # of which what is printed is compared as well: tests/docs/test_cli_page.py


def _at_night(page: Path) -> object:
    """What takes many loads: the nightly part `readme`."""
    is_long = shown(page) == "examples/gallery/README.md"
    return pytest.param(page, marks=pytest.mark.nightly) if is_long else page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copies are made in here."""
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def going(folder: Path) -> Iterator[RunningAdapter]:
    """What pages that start no adapter take for given: `make run` is going."""
    with embedded_adapter("--examples", f"--model-roots={folder}") as adapter:
        yield adapter


@pytest.fixture
def here(folder: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    with place(folder / str(id(request))) as made:
        yield made


@pytest.mark.triton
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [*map(_at_night, RUN)], ids=shown)
def test_the_blocks_of_a_page_can_be_pasted(
    page: Path, here: Place, request: pytest.FixtureRequest
) -> None:
    before = set(here.folder.iterdir())
    if any(block.mode == "server" for block in blocks(page)):
        here.paste(page)
    else:
        adapter = request.getfixturevalue("going")
        here.listeners = {
            **adapter.listeners,
            "triton_http": adapter.http_address,
            "triton_grpc": adapter.grpc_address,
        }
        here.paste(page)
        unload_all(adapter)
    made = {path.name for path in set(here.folder.iterdir()) - before}
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    # the place has this folder instead of /models
    assert made - {"models-of-the-page"} <= ignored, "git would list these files"


@rows("block", BLOCKS)
def test_code_block_says_whether_it_is_run(block: Block) -> None:
    assert block.language in RUNNABLE | DATA
    if block.language in DATA:
        assert block.note in {"", "answer"}
        return
    assert block.mode in {"", "server", "refused", "run-by", "not-run"}
    assert bool(block.reason) == (block.mode in {"run-by", "not-run"})
    if block.mode == "run-by":
        assert (ROOT / block.reason).is_file()


@rows("block", [b for b in BLOCKS if b.language in {"json", "yaml"}])
def test_a_block_of_data_can_be_read(block: Block) -> None:
    assert list(yaml.safe_load_all(block.text))  # what is JSON is YAML as well
    if block.language == "json":
        json.loads(block.text)
