"""One adapter with a store of models that take texts."""

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest

from tests.journeys.openai.models import write_classifier, write_completer, write_embedder
from tests.running import COMPLETE, EXAMPLES, RunningAdapter, embedded_adapter

GALLERY = EXAMPLES.parent / "gallery"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openai") / "store"
    write_embedder(folder / "batches", salt="batches")
    write_embedder(folder / "single", salt="single", batch=0, dims=-1)
    write_classifier(folder / "moods", labels=("calm", "glad", "so: so"))
    write_classifier(folder / "numbers", batch=0)
    write_classifier(folder / "latin", labels=("calm", "glad", "sad"))
    (folder / "latin" / "labels.txt").write_bytes(b"calm\ncaf\xe9\r\nsad\n")
    write_completer(folder / "words")
    write_completer(folder / "killed")
    write_completer(folder / "other", prompt="IN", text="OUT")
    copytree(GALLERY / "text", folder / "text")
    copytree(GALLERY / "ensemble", folder / "ensemble")
    return folder


@pytest.fixture(scope="session")
def shared_adapter(store: Path) -> Iterator[RunningAdapter]:
    """The adapter that the fixtures `adapter` and `client` of all tests take."""
    flags = (f"--model-store={store}", f"--cache-dir={store.parent / 'cache'}", "--on-demand")
    with embedded_adapter(*flags, COMPLETE) as adapter:
        yield adapter
